"""ARSQ on a task of Gymnasium with continuous actions, from its own steps and, with `dataset`, from demonstrations too.

`python -m stages.control.soft_q.online --settings FILE --result FILE` learns once: a run of lane control with `environment:
soft_q`. Demonstrations are a whole data set in Minari's format, whatever its quality.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.control.learnt import Learnt
from stages.control.off_policy.replay import Demonstrations
from stages.control.off_policy.training import Training
from stages.control.off_policy.vector_task import VectorTask
from stages.control.offline.datasets import read_dataset
from stages.control.offline.training import transitions
from stages.control.one_run import one_run
from stages.control.soft_q.agent import SoftQAgent
from stages.control.soft_q.settings import SoftQTask
from stages.runtime.command import command


def demonstrations_of(settings: SoftQTask) -> Demonstrations | None:
    """The data set that the settings name. Raises ParamsError if it does not exist or is of another shape than the task."""
    if settings.dataset is None:
        return None
    data = read_dataset(Path(settings.folder), settings.dataset)
    return Demonstrations(transitions(data, VectorTask(settings.task, 1), settings.reward_scale), settings.demonstration_share)


def learn(settings: SoftQTask) -> Learnt:
    """Learn once; see `Rounds.learnt`. least_advantage: over both networks, all bins, and the steps in the replay buffer."""
    demonstrations = demonstrations_of(settings)
    rows = 0 if demonstrations is None else demonstrations.rows(settings.batch)

    def make(chosen: Any, observations: int, actions: int) -> SoftQAgent:
        return SoftQAgent(chosen, observations, actions, rows)

    training = Training(settings, make, demonstrations)
    training.train()
    least = training.agent.least_advantage(training.replay.everything())
    return training.learnt(least_advantage=least, updates=float(training.agent.updates))


def run(settings: SoftQTask) -> dict[str, float]:
    """The figures of `learn`."""
    return learn(settings).figures


@command
def main() -> int:
    return one_run("control", __doc__, SoftQTask, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
