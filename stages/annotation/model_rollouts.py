"""Rollouts of tree search in a learnt model of the environment, fitted to the episodes of the stage rollout.

The episodes are replayed in the environment, which gives the states that they do not record. Expansion still plays there: nodes,
their rewards and ends are real. Rollouts are not, so that what counts them (`n_success`, R) is the model's word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stages.annotation.tree import returns_to_go
from stages.environments.learnt import Features, Imaginable
from stages.records.episode import read_rows
from stages.values.fitting import TaskSplit
from stages.values.state_model import LearntModel, Moves, errors, fit, predicted

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate
    from stages.environments.protocol import Domain, Environment
    from stages.records.task import Task
    from stages.runtime.checkpoints import Checkpoints
    from stages.runtime.stage import StageContext

CHECKPOINT = "model-rollouts"


@dataclass(frozen=True)
class LearntDynamics:
    """What an imagined environment needs, and how good it is on held-out tasks."""

    features: Features
    model: LearntModel
    metrics: dict[str, Any]


def replayed(
    environment: Environment, features: Features, tasks: Mapping[str, Task], episodes: Iterable[Mapping[str, Any]]
) -> tuple[Moves, list[str], list[Any]]:
    """The steps of episodes (rows of EPISODE_SCHEMA), their tasks, and the snapshots after them."""
    columns: list[list[Any]] = [[], [], [], [], []]
    names, after = [], []
    for row in episodes:
        task = tasks[row["task_id"]]
        environment.reset(task)
        rewards, before = [], environment.snapshot()
        for turn in row["turns"]:
            action = turn["action"]
            columns[0].append(features.state(task, before))
            columns[1].append(features.action(task, before, action))
            step = environment.step(action)
            before = environment.snapshot()
            columns[2].append(features.state(task, before))
            columns[3].append(features.action(task, before, action)[features.actions - features.context :])
            rewards.append(float(step.reward))
            names.append(task.task_id)
            after.append(before)
            if step.done:
                break
        columns[4] += returns_to_go(rewards, 1.0)[:-1]
    stacked = (torch.from_numpy(np.array(column, dtype=np.float32)) for column in columns)
    return Moves(*stacked), names, after


def exact(
    model: LearntModel, features: Features, tasks: Mapping[str, Task], data: Moves, names: Sequence[str], after: Sequence[Any]
) -> float:
    """Share of the steps whose predicted state, decoded, is the true one."""
    found = predicted(model, data).numpy()
    right = [features.same(tasks[name], snapshot, one) for name, snapshot, one in zip(names, after, found, strict=True)]
    return sum(right) / len(right)


def learn_dynamics(
    context: StageContext, domain: Domain, tasks: Sequence[Task], params: Annotate, checkpoints: Checkpoints
) -> LearntDynamics | None:
    """The model of `annotate.evaluation.model_rollouts`, or None; fitted on the rollouts of all training `tasks` but a held-out
    share. Raises ValueError without episodes."""
    settings, name = params.evaluation.model_rollouts, str(context.domain)
    if settings is None:
        return None
    assert isinstance(domain, Imaginable), "checked with params.yaml"
    features = domain.features(tasks)
    model = LearntModel(settings, (features.states, features.actions, features.context), context.params.seed)
    saved = checkpoints.load(CHECKPOINT)
    if saved is None:
        known = {task.task_id: task for task in tasks}
        rows = read_rows(context.data / "rollouts" / name / "episodes.parquet")
        environment = domain.make(context.data / "curated" / name / "worlds")
        data, names, after = replayed(
            environment, features, known, (row for row in rows if row["turns"] and row["task_id"] in known)
        )
        environment.close()
        split = TaskSplit.of(names, params.value_model.valid_share, context.params.seed)
        held = torch.tensor([one in split.held_out for one in names])
        with context.progress("fitting a model of the environment", 1, "model"):
            fit(model, data.at(~held), context.params.seed)
        rest = held.nonzero()[:, 0]
        chosen = [names[row] for row in rest], [after[row] for row in rest]
        metrics = {"steps": int((~held).sum()), "held_out": {"steps": len(rest), **errors(model, data.at(rest))}}
        metrics["held_out"]["exact"] = exact(model, features, known, data.at(rest), *chosen)
        metrics["held_out"]["unchanged"] = float((data.at(rest).state == data.at(rest).following).all(1).float().mean())
        saved = {"model": model.state_dict(), "metrics": metrics}
        checkpoints.save(CHECKPOINT, saved)
    model.load_state_dict(saved["model"])
    return LearntDynamics(features, model.eval().requires_grad_(False), saved["metrics"])
