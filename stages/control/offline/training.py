"""The offline loop: draw a batch of the data set, update, evaluate.

`python -m stages.control.offline.training --settings FILE --result FILE` learns once: a run of lane control with
`environment: offline`. Draws and updates follow from the settings and the data set alone, with one thread to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.control.learnt import Learnt
from stages.control.off_policy.agent import Agent
from stages.control.off_policy.evaluation import mean_return, overestimation
from stages.control.off_policy.model_evaluation import model_figures
from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.vector_task import VectorTask
from stages.control.offline.agents import Clone
from stages.control.offline.datasets import DataSet, content_hash, read_dataset
from stages.control.offline.imagination import OfflineImagination, edge_figures
from stages.control.offline.settings import Offline
from stages.control.one_run import one_run
from stages.control.rounds import Rounds
from stages.runtime.command import command
from stages.runtime.validation import ParamsError
from stages.seeding import key64, seed_torch

SHARED = (
    *("seed", "reward_scale", "gamma", "batch", "width", "layers", "learning_rate", "target_rate"),
    *("critics", "diversity", "aggregate", "evaluate_episodes"),
    *("policy_learning_rate", "alpha_learning_rate", "log_std_range", "tune_alpha", "dynamics"),
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


class Training(Rounds):
    """One agent's run; see `Offline`."""

    made_with = "settings or data"

    def __init__(self, settings: Offline, data: DataSet | None = None) -> None:
        """data: in place of the one that the settings name. Raises ParamsError, ModuleNotFoundError as `read_dataset` and
        VectorTask do."""
        super().__init__()
        seed_torch(settings.seed, "offline")
        self.settings = settings
        data = data or read_dataset(Path(settings.folder), settings.dataset)
        self.hash, self.behaviour = content_hash(data.episodes), data.mean_return
        self.task = VectorTask(settings.task or data.task, settings.evaluate_episodes)
        self.data = Replay.of(transitions(data, self.task, settings.reward_scale))
        self.agent = make_agent(settings, self.task)
        self.imagination = self._imagination()
        self.generator = torch.Generator().manual_seed(key64(settings.seed, "offline", "draws") % 2**63)

    def _imagination(self) -> OfflineImagination | None:
        """None without rollouts. Raises ParamsError if exact dynamics are not of this task."""
        dynamics = self.settings.dynamics
        if dynamics is None or not self.agent.settings.imagines:
            return None
        if dynamics.exact and self.task.task != "Pendulum-v1":
            raise ParamsError(
                f"dynamics.exact: the dynamics of {self.task.task} are not known here, Pendulum-v1's alone; remove it"
            )
        self.agent.scale.copy_(self.data.everything().observation.std(0, correction=0))
        return OfflineImagination(self.agent.settings, self.task.observations, self.task.actions)

    @property
    def done(self) -> bool:
        return self.agent.updates >= self.settings.updates

    def round(self) -> None:
        """`evaluate_every` updates and an evaluation. Raises ParamsError if values diverged."""
        for _ in range(self.settings.evaluate_every):
            self.agent.update(self.draw(), self.generator)
        self.check()
        seed = key64(self.settings.seed, "offline", "evaluation", self.agent.updates) % 2**31
        self.returns.append(mean_return(self.agent.greedy, self.task, seed))

    def draw(self) -> Transitions:
        """A batch, of which a share is the model's if there is one."""
        if self.imagination is None:
            return self.data.draw(self.settings.batch, self.generator)
        self.imagination.prepare(self.data, self.agent, self.agent.updates, self.generator)
        return self.imagination.draw(self.data, self.agent.updates, self.generator)

    def check(self) -> None:
        """Raise ParamsError if values of soft actor-critic are not finite: bootstrapping beyond the data can raise them on and
        on."""
        if self.settings.method != "sac":
            return
        first = self.data.everything().at(torch.arange(1))
        if not torch.isfinite(self.agent.values(first.observation, first.action)).all():
            raise ParamsError(
                f"critics: values are not finite after {self.agent.updates} updates; raise critics, shorten dynamics.horizon, or "
                f"lower learning_rate or reward_scale"
            )

    def state(self) -> dict[str, Any]:
        imagined = {"imagination": self.imagination.state()} if self.imagination else {}
        return {**super().state(), **imagined}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self.imagination:
            self.imagination.restore(state["imagination"])

    def figures(self) -> dict[str, float]:
        """Of a run with a model; see `edge_figures` and `model_figures`."""
        if self.imagination is None:
            return {}
        generator = torch.Generator().manual_seed(key64(self.settings.seed, "offline", "edge") % 2**63)
        found = edge_figures(self.imagination, self.data, self.agent, self.agent.updates, generator)
        return {**found, **model_figures(self.agent, self.imagination, self.agent.settings)}

    def identity(self) -> str:
        return super().identity() + self.hash


def learn(settings: Offline) -> Learnt:
    """Learn once; see `Rounds.learnt`. behaviour: mean return in the data set; overestimation: with `method: sac`, see its
    function; with a model also `Training.figures`."""
    training = Training(settings)
    training.train()
    figures = {"behaviour": training.behaviour}
    if settings.method == "sac":
        figures["overestimation"] = overestimation(training.agent, training.agent.settings)
        figures |= training.figures()
    return training.learnt(**figures)


def run(settings: Offline) -> dict[str, float]:
    """The figures of `learn`."""
    return learn(settings).figures


@command
def main() -> int:
    return one_run("control", __doc__, Offline, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
