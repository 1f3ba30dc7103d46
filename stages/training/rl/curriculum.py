"""Draws each step's tasks without replacement, weighted by measured difficulty."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.algorithms.parts.curriculum import Curriculum
from stages.algorithms.parts.selection import Selection
from stages.curation.model_aware import shares
from stages.records.task import Task, opening
from stages.seeding import stream
from stages.training.common.batches import padded, plan_micro_batches
from stages.training.common.processes import Processes
from stages.values.step_value import StepValueModel

RATE = 0.5
"""Weight of a step's success rate in the running estimate of a task's success."""


def selected(task_ids: Iterable[str], measured: Mapping[str, float], params: Selection) -> dict[str, float]:
    """The tasks that may be drawn, with a factor on their weights: all with 1, or those that `shares` selects.

    Raises ValueError if none is selected.
    """
    names = sorted(task_ids)
    if params.kind == "all":
        return dict.fromkeys(names, 1.0)
    known = {name: measured[name] for name in names if name in measured}
    found = shares(known, params.easy_min, params.hard_max, params.target.model_dump())
    if not found:
        raise ValueError(
            f"rl.selection.kind: model_aware selects none of the {len(known)} tasks that rollout measured: the policy always or "
            f"never solves them, or rl.selection.target is 0 for the rest; raise rollout.attempts or rollout.tasks"
        )
    return found


def first_values(
    tasks: Sequence[Task], pool: EnvironmentPool, chat: Chat, model: StepValueModel, tokens_per_batch: int, processes: Processes
) -> dict[str, float]:
    """Task -> the return in [0, 1] that the step-value model predicts before the first turn. The processes share the tasks."""
    environment = pool.take()
    own = [
        chat.prompt_tokens(opening(task.prompt, environment.reset(task).text))
        for task in tasks[processes.index :: processes.count]
    ]
    pool.give_back(environment)
    prompts = processes.gather(own)
    found: list[tuple[str, float]] = []
    plan = plan_micro_batches([len(prompt) for prompt in prompts], tokens_per_batch)
    for rows, active in processes.shard(plan):
        token_ids = padded([prompts[row] for row in rows], 0, torch.int64).to(processes.device)
        lengths = torch.tensor([len(prompts[row]) for row in rows], device=processes.device)
        values = model.turn_values(token_ids, lengths, lengths[:, None] - 1)[:, 0].clamp(0.0, 1.0).tolist()
        found += zip((tasks[row].task_id for row in rows), values, strict=True) if active else ()
    return dict(sorted(processes.gather(found)))


class TaskSampler:
    """Running estimates of each task's success p, which start at rollout's measurements; or, with kind `value`, of its return in
    [0, 1], which start at the step-value model's predictions.

    `difficulty` and `value` weight a task by p (1 - p) + floor: groups that always or never succeed have no signal, and the
    variance of returns in [0, 1] with mean p is at most p (1 - p). Unmeasured tasks start at the mean of the measured ones.
    factors: task -> factor on its weight, 1 by default. Raises ValueError if there are fewer tasks than a step draws.
    """

    def __init__(
        self,
        task_ids: Iterable[str],
        measured: Mapping[str, float],
        params: Curriculum,
        per_step: int,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.task_ids = sorted(task_ids)
        if len(self.task_ids) < per_step:
            raise ValueError(
                f"rl.tasks_per_step is {per_step}, but there are only {len(self.task_ids)} training tasks to draw from; lower "
                f"it, or raise curate.train (with rl.selection.kind model_aware, rollout.tasks)"
            )
        known = [measured[task_id] for task_id in self.task_ids if task_id in measured]
        mean = sum(known) / len(known) if known else 0.5
        self.success = {task_id: float(measured.get(task_id, mean)) for task_id in self.task_ids}
        self.params, self.per_step = params, per_step
        self.factors = {task_id: (factors or {}).get(task_id, 1.0) for task_id in self.task_ids}

    def weights(self) -> list[float]:
        """Drawing weight of each task, in the order of `task_ids`."""
        if self.params.kind == "uniform":
            return [self.factors[task] for task in self.task_ids]
        shares_ = (self.success[task] * (1 - self.success[task]) + self.params.floor for task in self.task_ids)
        return [share * self.factors[task] for task, share in zip(self.task_ids, shares_, strict=True)]

    def draw(self, *key: object, count: int | None = None, without: Collection[str] = ()) -> list[str]:
        """A step's tasks, sorted: a weighted draw without replacement (largest u^(1/w), Efraimidis and Spirakis 2006) that
        depends on `key` alone.

        Tasks of weight 0 are drawn only if the others do not suffice. count: default `per_step`. without: tasks to exclude, so
        there may be fewer than `count`.
        """
        rng = stream("curriculum", *key)
        scores = [(rng.random() ** (1 / weight) if weight > 0 else -rng.random()) for weight in self.weights()]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        left = [self.task_ids[index] for index in order if self.task_ids[index] not in without]
        return sorted(left[: self.per_step if count is None else count])

    def observe(self, outcomes: Mapping[str, Sequence[float]]) -> None:
        """Update the estimates of the played tasks by the mean of their outcomes (exponential moving average)."""
        for task_id, results in outcomes.items():
            share = sum(results) / len(results)
            self.success[task_id] += RATE * (share - self.success[task_id])
