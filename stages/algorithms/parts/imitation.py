"""Settings of self-imitation (Oh et al., arXiv 1806.05514); stages/training/rl/imitation.py implements it. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from stages.algorithms.parts.part import AppliesAboveZero, Part
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Imitation(Part):
    """Self-imitation: earlier episodes that ended better than the policy usually does at their task are learned again."""

    data = ("episodes",)

    ratio: NonNegative = 0.0
    """Replayed episodes per episode of a step, divided equally among epochs and minibatches. They share the optimizer updates, so
    minibatches without an update (all groups dead) replay none, but a step without any update has one of theirs. 0: none."""
    coef: Annotated[Positive, AppliesAboveZero("ratio")] = 1.0
    """Weight of their loss, the mean over tokens of max(R - b, 0) times the negative log-probability: R is the episode's outcome,
    b the curriculum's running estimate of it for the task."""
    capacity: Annotated[Count, AppliesAboveZero("ratio")] = 20_000
    """Maximum number of stored turns; the oldest episodes are dropped. Episodes without success are not stored."""

    def check(self, rl: Rl, method: Composition) -> None:
        if self.ratio and rl.advantage.estimator == "utterance":
            raise ParamsError(
                "rl.imitation.ratio is above 0, and rl.advantage.estimator: utterance replays all episodes with the values of "
                "its critic: set ratio to 0, or estimator to group or gae"
            )
