"""Settings of trees that the policy grows during rl; stages/training/rl/reannotation.py implements it. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from stages.algorithms.parts.part import AppliesAboveZero, AppliesIf, Part
from stages.algorithms.parts.step_values import not_a_return
from stages.runtime.validation import ParamsError, explain

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


def _fits_values(rl: Rl) -> bool:
    return rl.credit.kind == "annotated"


def _reads_trees(rl: Rl) -> bool:
    return _fits_values(rl) or rl.imitation.ratio > 0


UNUSED = (
    *("chunk", "pairs", "q_model", "progress", "judge_model"),
    *("labels.scale", "labels.min_visits", "labels.pool", "value_model.rollouts"),
)
"""Keys of section annotate that nothing reads during rl: no labels are written, and values are fitted to the trees alone."""
OF_VALUES = ("labels", "value_model")
"""Keys that only the fit of the step-value model reads."""


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

    def check(self, rl: Rl, method: Composition) -> None:
        if not self.every:
            return
        nested = {f"{name}.{key}" for name, of in self.annotate.items() if isinstance(of, Mapping) for key in of}
        given = {*self.annotate, *nested}
        for keys, needs in ((UNUSED, "nothing"), (() if _fits_values(rl) else OF_VALUES, "only credit.kind: annotated")):
            if idle := sorted(given & set(keys)):
                raise ParamsError(f"rl.reannotate.annotate.{idle[0]} has no effect: {needs} reads it during rl; remove it")

    def check_returns(self, low: float, high: float) -> None:
        """Raise ParamsError unless a domain's returns, which are in [low, high], are those of the searches' settings."""
        given = self.annotate.get("returns", [0.0, 1.0])
        if self.every and list(given) != [low, high]:
            raise ParamsError(
                f"rl.reannotate.annotate.returns is {given}, and the domain's episodes return {[low, high]}: set it to "
                f"{[low, high]}"
            )

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        if not self.every:
            return
        if section("model").lora.rank and _fits_values(rl):
            yield (
                f"rl.reannotate.every with credit.kind annotated fits a copy of the policy's weights, and model.lora.rank is "
                f"{section('model').lora.rank}: set every or rank to 0"
            )
        shape = type(section("annotate"))
        try:
            given = shape.model_validate(self.annotate)
        except ValidationError as error:
            yield explain(error, shape, "rl.reannotate.annotate")
            return
        if not given.tasks:
            yield "rl.reannotate.annotate.tasks is 0, so that there would be no trees: set it above 0, or every to 0"
        if given.evaluation.kind != "rollout":
            yield (
                f"rl.reannotate.annotate.evaluation.kind is {given.evaluation.kind}, which needs a model that annotate fits "
                f"before its search: set it to rollout"
            )
        if given.evaluation.model_rollouts is not None:
            yield (
                "rl.reannotate.annotate.evaluation.model_rollouts needs a model that annotate fits before its "
                "search: set it to null"
            )
        if _fits_values(rl):
            yield from not_a_return(given, "reannotate.annotate", "every to 0")
