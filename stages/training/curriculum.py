"""Which tasks a step plays: drawn without replacement, by weights that follow measured difficulty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stages.params import Curriculum
from stages.seeding import stream

RATE = 0.5
"""Weight of a step's success share in the running estimate of a task's success."""


class TaskSampler:
    """Success estimates by task, from rollout's measurements and updated while training; draws depend on (key, step) alone.

    `difficulty` weights a task by p (1 - p) + floor: tasks that always or never succeed have groups without signal.
    Tasks that rollout has not measured start at the mean of those it has. Raises ValueError if there are fewer tasks than
    a step draws.
    """

    def __init__(self, task_ids: Iterable[str], measured: Mapping[str, float], params: Curriculum, per_step: int) -> None:
        self.task_ids = sorted(task_ids)
        if len(self.task_ids) < per_step:
            raise ValueError(
                f"rl.tasks_per_step is {per_step}, but there are only {len(self.task_ids)} training tasks; lower it, or raise "
                f"curate.train"
            )
        known = [measured[task_id] for task_id in self.task_ids if task_id in measured]
        usual = sum(known) / len(known) if known else 0.5
        self.success = {task_id: float(measured.get(task_id, usual)) for task_id in self.task_ids}
        self.params, self.per_step = params, per_step

    def weights(self) -> list[float]:
        """Drawing weight of each task, in the order of `task_ids`."""
        if self.params.kind == "uniform":
            return [1.0] * len(self.task_ids)
        return [self.success[task] * (1 - self.success[task]) + self.params.floor for task in self.task_ids]

    def draw(self, *key: object) -> list[str]:
        """The step's tasks, sorted: weighted, without replacement (largest u^(1/w), Efraimidis and Spirakis 2006).

        Tasks of weight 0 are drawn only when the others do not suffice.
        """
        rng = stream("curriculum", *key)
        scores = [(rng.random() ** (1 / weight) if weight > 0 else -rng.random()) for weight in self.weights()]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        return sorted(self.task_ids[index] for index in order[: self.per_step])

    def observe(self, outcomes: Mapping[str, Sequence[bool]]) -> None:
        """Move the estimates of the tasks just played towards their success shares (exponential mean)."""
        for task_id, results in outcomes.items():
            share = sum(results) / len(results)
            self.success[task_id] += RATE * (share - self.success[task_id])
