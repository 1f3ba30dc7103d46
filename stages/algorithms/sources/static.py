"""The tasks that curate wrote, drawn without replacement and weighted by difficulty (`rl.curriculum`)."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.algorithms.parts.curriculum import Curriculum
from stages.algorithms.task_source import SourceInputs, TaskSource
from stages.seeding import stream

if TYPE_CHECKING:
    from stages.records.episode import Episode
    from stages.records.task import Task

RATE = 0.5
"""Weight of a step's success rate in the running estimate of a task's success."""


class TaskSampler:
    """Running estimates of each task's success p, which start at rollout's measurements; or, with kind `value`, of its return in
    [0, 1], which start at the step-value model's predictions.

    `difficulty` and `value` weight a task by p (1 - p) + floor: groups that always or never succeed have no signal, and the
    variance of returns in [0, 1] with mean p is at most p (1 - p). Unmeasured tasks start at the mean of the measured ones, or
    at 0.5 if there are none.
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
        """A step's tasks, sorted: a weighted draw without replacement (largest u^(1/w), Efraimidis and Spirakis 2006; here
        its logarithm, which small weights don't round to 0) that depends on `key` alone.

        Tasks of weight 0 are drawn only if the others do not suffice. count: default `per_step`. without: tasks to exclude, so
        there may be fewer than `count`.
        """
        rng = stream("curriculum", *key)
        weights = self.weights()
        uniform = [max(rng.random(), sys.float_info.min) for _ in weights]
        scores = [math.log(u) / weight if weight > 0 else -u for u, weight in zip(uniform, weights, strict=True)]
        order = sorted(range(len(scores)), key=lambda index: (weights[index] <= 0, -scores[index], index))
        left = [self.task_ids[index] for index in order if self.task_ids[index] not in without]
        return sorted(left[: self.per_step if count is None else count])

    def observe(self, outcomes: Mapping[str, Sequence[float]]) -> None:
        """Update the estimates of the played tasks by the mean of their outcomes (exponential moving average)."""
        for task_id, results in outcomes.items():
            share = sum(results) / len(results)
            self.success[task_id] += RATE * (share - self.success[task_id])


class StaticTasks(TaskSource):
    """Curated tasks and the running estimates of their success, or of their return (`rl.curriculum.kind: value`)."""

    curated = True

    def __init__(self, inputs: SourceInputs) -> None:
        super().__init__(inputs)
        rl = inputs.rl
        self.sampler = TaskSampler(inputs.weights, inputs.measured, rl.curriculum, rl.tasks_per_step, inputs.weights)

    def draw(self, *key: object, count: int | None = None, without: Collection[str] = ()) -> list[Task]:
        return [self.inputs.tasks[task_id] for task_id in self.sampler.draw(*key, count=count, without=without)]

    def outcome(self, episode: Episode) -> float:
        """What the estimates are of: the episode's success, or its return where a step-value model started them."""
        return episode.reward if self.inputs.rl.curriculum.kind == "value" else float(episode.success)

    def observe(self, step: int, episodes: Sequence[Episode]) -> None:
        outcomes: dict[str, list[float]] = {}
        for episode in episodes:
            outcomes.setdefault(episode.task_id, []).append(self.outcome(episode))
        self.sampler.observe(outcomes)

    def state_dict(self) -> dict[str, Any]:
        return {"success": self.sampler.success}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.success = state["success"]


SOURCE = StaticTasks
