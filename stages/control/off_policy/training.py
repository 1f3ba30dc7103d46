"""Off-policy learning: play, store, update, evaluate.

`python -m stages.control.off_policy.training --settings FILE --result FILE` trains an actor and its critics: a run of lane
control with `environment: gymnasium`. deep_q.py has DQN's. Steps, draws and updates follow from the settings alone, with one
thread to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
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
from stages.control.rounds import Rounds
from stages.runtime.command import command
from stages.seeding import key64, seed_torch

MakeAgent = Callable[[Any, int, int], Any]
"""Settings, numbers in an observation, actions -> an agent as `make_agent` makes them."""


class Training(Rounds):
    """One agent's run; see `OffPolicy` and `DeepQ`."""

    def __init__(self, settings: Loop, make: MakeAgent | None = None, demonstrations: Demonstrations | None = None) -> None:
        """make: of agents of other settings than these. Raises ParamsError, ModuleNotFoundError as VectorTask does."""
        super().__init__()
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
        self.imagination = Imagination(settings, *sizes) if isinstance(settings, OffPolicy) and settings.imagines else None
        self.generator = torch.Generator().manual_seed(key64(settings.seed, "off_policy", "draws") % 2**63)
        self.steps = 0

    @property
    def done(self) -> bool:
        return self.steps >= self.settings.steps

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

    def identity(self) -> str:
        recorded = "" if self.demonstrations is None else f" {self.demonstrations.digest()}"
        return super().identity() + recorded

    def state(self) -> dict[str, Any]:
        imagined = {"imagination": self.imagination.state()} if self.imagination else {}
        return {**super().state(), "replay": self.replay.state(), "steps": self.steps, **imagined}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.replay.restore(state["replay"])
        self.steps = state["steps"]
        if self.imagination:
            self.imagination.restore(state["imagination"])


def make_agent(settings: Loop, observations: int, actions: int) -> Any:
    """The agent that the settings are of: an `OffPolicyAgent`."""
    if isinstance(settings, DeepQ):
        return Dqn(settings, observations, actions)
    assert isinstance(settings, OffPolicy)
    return Agent(settings, observations, actions)


def learn(settings: OffPolicy) -> Learnt:
    """Train once; see `Rounds.learnt`. overestimation: see its function; the others: see `model_figures`."""
    training = Training(settings)
    training.train()
    return training.learnt(
        overestimation=overestimation(training.agent, settings),
        alpha=float(training.agent.log_alpha.detach().exp()),
        updates=float(training.agent.updates),
        **model_figures(training.agent, training.imagination, settings),
    )


def run(settings: OffPolicy) -> dict[str, float]:
    """The figures of `learn`."""
    return learn(settings).figures


@command
def main() -> int:
    return one_run("control", __doc__, OffPolicy, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
