"""Settings of task sampling in training; stages/training/rl/curriculum.py implements it. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.algorithms.parts.step_values import not_a_return
from stages.algorithms.task_source import source_class
from stages.runtime.validation import Share

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Curriculum(Part):
    """How training tasks are sampled."""

    data = ("episodes",)
    applies = AppliesIf(
        lambda rl: source_class(rl.tasks.source).weighted(rl),
        "a task source that draws by it (tasks.source: static or instructions)",
    )

    kind: Literal["uniform", "difficulty", "value"] = "difficulty"
    """`difficulty`: tasks are sampled with weight p(1-p) + floor. p is the success rate: it starts at rollout's measurement (0.5
    if it measured no task) and is updated during training. `value`: p starts as the prediction of annotate's step-value model for
    the first observation, for every task."""
    floor: Annotated[Share, AppliesTo("kind", "difficulty", "value")] = 0.05
    """difficulty, value: added to every task's weight."""

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        if self.kind != "value":
            return
        annotate = section("annotate")
        yield from not_a_return(annotate, "curriculum.kind: value", "kind to difficulty")
        if annotate.returns != [0.0, 1.0]:
            yield (
                f"rl.curriculum.kind: value draws tasks by p (1 - p) of returns p in [0, 1], and annotate.returns is "
                f"{annotate.returns}: set kind to difficulty"
            )
