"""The offline loop: draw a batch of the data set, update, evaluate.

`python -m stages.control.offline.training --settings FILE --result FILE` learns once: a run of lane control with
`environment: offline`. Draws and updates follow from the settings and the data set alone, with one thread to the bit.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from stages.control.learnt import Learnt
from stages.control.off_policy.agent import Agent
from stages.control.off_policy.evaluation import mean_return, overestimation
from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.vector_task import VectorTask
from stages.control.offline.agents import Clone
from stages.control.offline.datasets import DataSet, content_hash, read_dataset
from stages.control.offline.settings import Offline
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.runtime.files import atomic_file
from stages.runtime.validation import ParamsError
from stages.seeding import key64, seed_torch

SHARED = (
    *("seed", "reward_scale", "gamma", "batch", "width", "layers", "learning_rate", "target_rate"),
    *("critics", "diversity", "evaluate_episodes"),
)
"""Settings that soft actor-critic has, too."""


def transitions(data: DataSet, task: VectorTask, reward_scale: float) -> Transitions:
    """All steps of a data set, actions between -1 and 1. Raises ParamsError if its shapes are not the task's."""
    first = data.episodes[0]
    shapes = (first.observations.shape[1], first.actions.shape[1])
    if shapes != (task.observations, task.actions):
        raise ParamsError(
            f"dataset: {data.name} has observations of {shapes[0]} and actions of {shapes[1]} numbers, {task.task} of "
            f"{task.observations} and {task.actions}; use a data set of {task.task}, or remove task"
        )
    parts = {name: np.concatenate([getattr(one, name) for one in data.episodes]) for name in ("actions", "rewards")}
    scaled = (parts["actions"] - task.low) / (task.high - task.low) * 2.0 - 1.0
    terminated = [np.append(np.zeros(len(one.rewards) - 1), float(one.terminated)) for one in data.episodes]
    columns = (
        np.concatenate([one.observations[:-1] for one in data.episodes]),
        scaled,
        parts["rewards"] * reward_scale,
        np.concatenate([one.observations[1:] for one in data.episodes]),
        np.concatenate(terminated),
    )
    return Transitions(*(torch.from_numpy(np.ascontiguousarray(column, dtype=np.float32)) for column in columns))


def make_agent(settings: Offline, task: VectorTask) -> Any:
    if settings.method != "sac":
        return Clone(settings, task.observations, task.actions)
    shared = {name: getattr(settings, name) for name in SHARED}
    return Agent(OffPolicy.model_validate({**shared, "task": task.task}), task.observations, task.actions)


class Training:
    """One agent's run; see `Offline`."""

    def __init__(self, settings: Offline, data: DataSet | None = None) -> None:
        """data: in place of the one that the settings name. Raises ParamsError, ModuleNotFoundError as `read_dataset` and
        VectorTask do."""
        seed_torch(settings.seed, "offline")
        self.settings = settings
        data = data or read_dataset(Path(settings.folder), settings.dataset)
        self.hash, self.behaviour = content_hash(data.episodes), data.mean_return
        self.task = VectorTask(settings.task or data.task, settings.evaluate_episodes)
        self.data = transitions(data, self.task, settings.reward_scale)
        self.agent = make_agent(settings, self.task)
        self.generator = torch.Generator().manual_seed(key64(settings.seed, "offline", "draws") % 2**63)
        self.returns: list[float] = []
        """Mean return of each evaluation."""

    def train(self) -> None:
        """From the checkpoint, if there is one, to the end."""
        path = Path(self.settings.checkpoint) if self.settings.checkpoint else None
        if path and path.exists():
            self.load(path)
        while self.agent.updates < self.settings.updates:
            self.round()
            if path:
                self.save(path)

    def round(self) -> None:
        """`evaluate_every` updates and an evaluation."""
        for _ in range(self.settings.evaluate_every):
            rows = torch.randint(len(self.data.reward), (self.settings.batch,), generator=self.generator)
            self.agent.update(self.data.at(rows), self.generator)
        seed = key64(self.settings.seed, "offline", "evaluation", self.agent.updates) % 2**31
        self.returns.append(mean_return(self.agent.greedy, self.task, seed))

    def _identity(self) -> str:
        return self.settings.model_dump_json(exclude={"checkpoint"}) + self.hash

    def save(self, path: Path) -> None:
        """Write everything that `load` needs to go on exactly, atomically."""
        state = {
            "settings": self._identity(),
            "agent": self.agent.state_dict(),
            "optimiser": self.agent.optimiser.state_dict(),
            "updates": self.agent.updates,
            "generator": self.generator.get_state(),
            "returns": self.returns,
        }
        with atomic_file(path) as partial:
            torch.save(state, partial)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote. Raises ParamsError if its settings or data are others."""
        state = torch.load(path, weights_only=True)
        if state["settings"] != self._identity():
            raise ParamsError(f"checkpoint: {path} is of a run with other settings or data; remove it, or use these again")
        self.agent.load_state_dict(state["agent"])
        self.agent.optimiser.load_state_dict(state["optimiser"])
        self.agent.updates, self.returns = state["updates"], state["returns"]
        self.generator.set_state(state["generator"])


def learn(settings: Offline) -> Learnt:
    """Learn once. return_end: of the last evaluation; return_mean: over all evaluations; behaviour: mean return in the data set;
    overestimation: with `method: sac`, see its function."""
    training = Training(settings)
    training.train()
    figures = {
        "return_end": training.returns[-1],
        "return_mean": fmean(training.returns),
        "behaviour": training.behaviour,
    }
    if settings.method == "sac":
        figures["overestimation"] = overestimation(training.agent, training.agent.settings)
    if settings.checkpoint:
        Path(settings.checkpoint).unlink()
    steps = [settings.evaluate_every * (number + 1) for number in range(len(training.returns))]
    return Learnt(figures, steps, training.returns, training.agent.greedy)


def run(settings: Offline) -> dict[str, float]:
    """The figures of `learn`."""
    return learn(settings).figures


@command
def main() -> int:
    return one_run("control", __doc__, Offline, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
