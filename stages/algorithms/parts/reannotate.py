"""Settings of trees that the policy grows during rl; stages/training/rl/reannotation.py implements it. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from stages.algorithms.parts.part import AppliesAboveZero, AppliesIf, Part
from stages.algorithms.parts.step_values import not_a_return
from stages.runtime.validation import explain

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


def _reads_trees(rl: Rl) -> bool:
    return rl.credit.kind == "annotated" or rl.imitation.ratio > 0


class Reannotate(Part):
    """Trees of the current policy during rl: the step-value model of credit.kind annotated is fitted to them, and self-imitation
    stores their correct paths."""

    data = ("episodes",)
    applies = AppliesIf(_reads_trees, "credit.kind: annotated, or an imitation.ratio above 0")

    every: Annotated[int, Field(ge=0)] = 0
    """Steps from one such search to the next; the trees' turns count as environment steps. 0: none."""
    annotate: Annotated[dict[str, Any], AppliesAboveZero("every")] = {}
    """Settings of these searches, as keys of section annotate ({tasks: 16, iterations: 8}); absent keys have that section's
    defaults, not its values in params.yaml. Leaves are evaluated by rollouts."""

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        if not self.every:
            return
        if section("model").lora.rank:
            yield (
                f"rl.reannotate.every fits a copy of the policy's weights, and model.lora.rank is {section('model').lora.rank}: "
                f"set every or rank to 0"
            )
        shape = type(section("annotate"))
        try:
            given = shape.model_validate(self.annotate)
        except ValidationError as error:
            yield explain(error, shape, "rl.reannotate.annotate")
            return
        if given.evaluation.kind != "rollout":
            yield (
                f"rl.reannotate.annotate.evaluation.kind is {given.evaluation.kind}, which needs a model that annotate fits "
                f"before its search: set it to rollout"
            )
        yield from not_a_return(given, "reannotate.annotate", "every to 0")
