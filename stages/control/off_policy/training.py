"""Off-policy learning: play, store, update, evaluate.

`python -m stages.control.off_policy.training --settings FILE --result FILE` trains an actor and its critics: a run of lane
control with `environment: gymnasium`. deep_q.py has DQN's. Steps, draws and updates follow from the settings alone, with one
thread to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from stages.control.learnt import Learnt
from stages.control.off_policy.agent import Agent
from stages.control.off_policy.dqn import Dqn
from stages.control.off_policy.dqn_settings import DeepQ
from stages.control.off_policy.evaluation import first_episodes, mean_return, overestimation
from stages.control.off_policy.imagination import Imagination
from stages.control.off_policy.model_evaluation import model_figures
from stages.control.off_policy.replay import Demonstrations, Replay, Transitions
from stages.control.off_policy.settings import Loop, OffPolicy
from stages.control.off_policy.vector_task import VectorTask
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.runtime.files import atomic_file
from stages.runtime.validation import ParamsError
from stages.seeding import key64, seed_torch

MakeAgent = Callable[[Any, int, int], Any]
"""Settings, numbers in an observation, actions -> an agent as `make_agent` makes them."""


class Training:
    """One agent's run; see `OffPolicy` and `DeepQ`."""

    def __init__(self, settings: Loop, make: MakeAgent | None = None, demonstrations: Demonstrations | None = None) -> None:
        """make: of agents of other settings than these. Raises ParamsError, ModuleNotFoundError as VectorTask does."""
        seed_torch(settings.seed, "off_policy")
        self.settings = settings
        allowed: Any = "discrete" if isinstance(settings, DeepQ) else "continuous"
        options = {"distractors": settings.distractors, "allowed": allowed}
        self.task = VectorTask(settings.task, settings.environments, **options)
        self.evaluated = VectorTask(settings.task, settings.evaluate_episodes, **options)
        sizes = (self.task.observations, self.task.actions)
        self.agent = (make or make_agent)(settings, *sizes)
        self.demonstrations = demonstrations
        known = 0 if demonstrations is None else len(demonstrations.data.reward)
        self.replay = Replay(min(settings.replay, settings.steps + known), sizes[0], 1 if self.task.discrete else sizes[1])
        if demonstrations is not None:
            self.replay.add(demonstrations.data)
        imagines = isinstance(settings, OffPolicy) and settings.dynamics
        self.imagination = Imagination(settings, *sizes) if imagines else None
        self.generator = torch.Generator().manual_seed(key64(settings.seed, "off_policy", "draws") % 2**63)
        self.steps = 0
        self.returns: list[float] = []
        """Mean return of each evaluation."""

    @property
    def evaluated_at(self) -> list[int]:
        """Steps before each evaluation."""
        return [self.settings.evaluate_every * (number + 1) for number in range(len(self.returns))]

    def train(self) -> None:
        """From the checkpoint, if there is one, to the end."""
        path = Path(self.settings.checkpoint) if self.settings.checkpoint else None
        if path and path.exists():
            self.load(path)
        while self.steps < self.settings.steps:
            self.round()
            if path:
                self.save(path)

    def round(self) -> None:
        """`evaluate_every` steps in new episodes, and an evaluation. A run can be saved between rounds."""
        observation = self.task.reset(first_episodes(self.settings, "episodes", self.steps))
        for _ in range(self.settings.evaluate_every // self.settings.environments):
            observation = self.step(observation)
        seed = first_episodes(self.settings, "evaluation", self.steps)
        self.returns.append(mean_return(self.agent.greedy, self.evaluated, seed))

    def step(self, observation: np.ndarray) -> np.ndarray:
        """One step of each environment and the updates that are due; the next observations."""
        settings, seen = self.settings, torch.from_numpy(observation)
        if warming := self.steps < settings.warm_up:
            action = self.task.random(len(observation), self.generator)
        else:
            action = self.agent.act(seen, self.steps, self.generator)
        outcome = self.task.step(action.numpy())
        reward = torch.from_numpy(outcome.reward) * settings.reward_scale
        terminated = torch.from_numpy(outcome.terminated).float()
        self.replay.add(Transitions(seen, action, reward, torch.from_numpy(outcome.following), terminated))
        self.steps += len(observation)
        if not warming:
            self.learn(self.agent.stepped(self.replay, self.steps))
        return outcome.observation

    def learn(self, updates: int) -> None:
        """Update the agent on batches of the replay buffer. Raises ParamsError as Imagination.prepare does."""
        if self.imagination:
            self.imagination.prepare(self.replay, self.agent, self.steps, self.generator)
        for _ in range(updates):
            if self.imagination:
                batch = self.imagination.draw(self.replay, self.steps, self.generator)
            elif self.demonstrations is not None:
                batch = self.demonstrations.draw(self.replay, self.settings.batch, self.generator)
            else:
                batch = self.replay.draw(self.settings.batch, self.generator)
            self.agent.update(batch, self.generator)

    def _identity(self) -> str:
        recorded = "" if self.demonstrations is None else f" {self.demonstrations.digest()}"
        return self.settings.model_dump_json(exclude={"checkpoint"}) + recorded

    def save(self, path: Path) -> None:
        """Write everything that `load` needs to go on exactly, atomically."""
        state = {
            "settings": self._identity(),
            "agent": self.agent.state_dict(),
            "optimiser": self.agent.optimiser.state_dict(),
            "updates": self.agent.updates,
            "replay": self.replay.state(),
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "returns": self.returns,
        }
        if self.imagination:
            state["imagination"] = self.imagination.state()
        with atomic_file(path) as partial:
            torch.save(state, partial)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote. Raises ParamsError if its settings are others."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if state["settings"] != self._identity():
            raise ParamsError(f"checkpoint: {path} is of a run with other settings; remove it, or use them: {state['settings']}")
        self.agent.load_state_dict(state["agent"])
        self.agent.optimiser.load_state_dict(state["optimiser"])
        self.agent.updates, self.steps, self.returns = state["updates"], state["steps"], state["returns"]
        self.replay.restore(state["replay"])
        self.generator.set_state(state["generator"])
        if self.imagination:
            self.imagination.restore(state["imagination"])


def make_agent(settings: Loop, observations: int, actions: int) -> Any:
    """The agent that the settings are of: an `OffPolicyAgent`."""
    if isinstance(settings, DeepQ):
        return Dqn(settings, observations, actions)
    assert isinstance(settings, OffPolicy)
    return Agent(settings, observations, actions)


def curve(settings: Loop) -> Training:
    """A finished run; its checkpoint is removed."""
    training = Training(settings)
    training.train()
    if settings.checkpoint:
        Path(settings.checkpoint).unlink()
    return training


def learn(settings: OffPolicy) -> Learnt:
    """Train once. return_end: of the last evaluation; return_mean: over all evaluations, the area under the learning curve;
    overestimation: see its function; the others: see `model_figures`."""
    training = curve(settings)
    figures = {
        "return_end": training.returns[-1],
        "return_mean": fmean(training.returns),
        "overestimation": overestimation(training.agent, settings),
        "alpha": float(training.agent.log_alpha.detach().exp()),
        "updates": float(training.agent.updates),
        **model_figures(training.agent, training.imagination, settings),
    }
    return Learnt(figures, training.evaluated_at, training.returns, training.agent.greedy)


def run(settings: OffPolicy) -> dict[str, float]:
    """The figures of `learn`."""
    return learn(settings).figures


@command
def main() -> int:
    return one_run("control", __doc__, OffPolicy, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
