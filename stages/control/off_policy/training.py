"""Off-policy actor-critic learning: play, store, update, evaluate.

`python -m stages.control.off_policy.training --settings FILE --result FILE` trains one agent: a run of lane control with
`environment: gymnasium`. Steps, draws and updates follow from the settings alone, with one thread to the bit.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from stages.control.off_policy.agent import Agent, Transitions
from stages.control.off_policy.evaluation import first_episodes, mean_return, overestimation
from stages.control.off_policy.imagination import Imagination
from stages.control.off_policy.model_evaluation import model_figures
from stages.control.off_policy.replay import Replay
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.vector_task import VectorTask
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.runtime.files import atomic_file
from stages.runtime.validation import ParamsError
from stages.seeding import key64, seed_torch

SCALE_EVERY = 1000
"""Updates between measurements of the states' standard deviations."""


class Training:
    """One agent's run; see `OffPolicy`."""

    def __init__(self, settings: OffPolicy) -> None:
        """Raises ParamsError, ModuleNotFoundError as VectorTask does."""
        seed_torch(settings.seed, "off_policy")
        self.settings = settings
        self.task = VectorTask(settings.task, settings.environments, distractors=settings.distractors)
        self.evaluated = VectorTask(settings.task, settings.evaluate_episodes, distractors=settings.distractors)
        self.agent = Agent(settings, self.task.observations, self.task.actions)
        self.replay = Replay(min(settings.replay, settings.steps), self.task.observations, self.task.actions)
        sizes = (self.task.observations, self.task.actions)
        self.imagination = Imagination(settings, *sizes) if settings.dynamics else None
        self.generator = torch.Generator().manual_seed(key64(settings.seed, "off_policy", "draws") % 2**63)
        self.steps = 0
        self.returns: list[float] = []
        """Mean return of each evaluation."""

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
        self.returns.append(mean_return(self.agent, self.evaluated, seed))

    def step(self, observation: np.ndarray) -> np.ndarray:
        """One step of each environment and the updates that are due; the next observations."""
        settings, seen = self.settings, torch.from_numpy(observation)
        if warming := self.steps < settings.warm_up:
            action = torch.rand(len(observation), self.task.actions, generator=self.generator) * 2.0 - 1.0
        else:
            with torch.no_grad():
                action = self.agent.policy.sample(seen, self.generator)[0]
        outcome = self.task.step(action.numpy())
        reward = torch.from_numpy(outcome.reward) * settings.reward_scale
        terminated = torch.from_numpy(outcome.terminated).float()
        self.replay.add(Transitions(seen, action, reward, torch.from_numpy(outcome.following), terminated))
        self.steps += len(observation)
        if not warming:
            self.learn(settings.updates_per_step * len(observation))
        return outcome.observation

    def learn(self, updates: int) -> None:
        """Update the agent on batches of the replay buffer. Raises ParamsError as Imagination.prepare does."""
        if self.agent.updates % SCALE_EVERY < updates:
            self.agent.scale.copy_(self.replay.everything().observation.std(0, correction=0))
        if self.imagination:
            self.imagination.prepare(self.replay, self.agent, self.steps, self.generator)
        for _ in range(updates):
            if self.imagination:
                batch = self.imagination.draw(self.replay, self.steps, self.generator)
            else:
                batch = self.replay.draw(self.settings.batch, self.generator)
            self.agent.update(batch, self.generator)

    def _identity(self) -> str:
        return self.settings.model_dump_json(exclude={"checkpoint"})

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


def run(settings: OffPolicy) -> dict[str, float]:
    """Train once. return_end: of the last evaluation; return_mean: over all evaluations, the area under the learning curve;
    overestimation: see its function; the others: see `model_figures`."""
    training = Training(settings)
    training.train()
    figures = {
        "return_end": training.returns[-1],
        "return_mean": fmean(training.returns),
        "overestimation": overestimation(training.agent, settings),
        "alpha": float(training.agent.log_alpha.detach().exp()),
        "updates": float(training.agent.updates),
        **model_figures(training.agent, training.imagination, settings),
    }
    if settings.checkpoint:
        Path(settings.checkpoint).unlink()
    return figures


@command
def main() -> int:
    return one_run("control", __doc__, OffPolicy, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
