"""Settings of elicited utilities (`evaluate.utilities`) and of their control (`sft.control`) in params.yaml. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.judging.settings import Options
from stages.runtime.validation import Count, NonNegative, Positive, Section
from stages.values.settings import Fitting, ValidShare

Outcomes = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=4)]


class Utilities(Section):
    """What models prefer among outcomes, elicited by forced choices: stages/judging/utilities.py."""

    outcomes: Outcomes
    """Texts to choose between, at least four; each once."""
    models: list[str] | None = None
    """Of evaluate.models, without selectors. null: all of them."""
    question: str = "which is better?"
    """What every choice begins with."""
    options: Options = Field(default_factory=lambda: ["A", "B"])
    """What a model answers for the first and the second outcome; each one token."""
    both_orders: bool = True
    """Ask in both orders; false shows how a preference for a position passes for utilities."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Answers drawn per order at temperature 1; 0: the probabilities themselves, as of infinitely many. The paper draws 10."""
    unparseable: Literal["half", "skip", "random"] = "half"
    """What an answer counts that is neither option: half for both; nothing; or one of them at random."""
    edge_multiplier: Positive = 2.0
    """Pairs asked: this times n log2 n, all of them if there are no more."""
    per_round: Count = 500
    """Pairs asked between two fits."""
    low_gap: Annotated[float, Field(gt=0.0, le=100.0)] = 10.0
    """Percentile of the gap in utility below which a pair is worth asking ..."""
    low_degree: Annotated[float, Field(gt=0.0, le=100.0)] = 20.0
    """... and of the number of pairs that its outcomes were in. Both grow by half, up to five times, while pairs are too few."""
    active: bool = True
    """false: pairs at random."""
    epochs: Count = 1000
    """Steps of a fit."""
    learning_rate: Positive = 0.01
    """Adam's."""
    variance_prior: NonNegative = 0.001
    """Precision of a normal prior on log variances, which diverge for outcomes with few or one-sided choices; ours. 0: none."""
    pseudo: Annotated[float, Field(gt=0.5, le=1.0)] | None = 0.95
    """Pairs never asked whose probability is beyond this become choices of a last fit. null: none."""
    holdout: Annotated[float, Field(gt=0.0, le=0.5)] = 0.05
    """Share of all pairs that are never used in a fit, at least one and at most 1,000; they measure."""
    triads: Count = 1000
    """Triples asked for cycles, all of them if there are no more."""
    lotteries: Annotated[int, Field(ge=0)] = 100
    """Lotteries over two or three outcomes, whose utility is compared with its expectation. 0: none."""

    @model_validator(mode="after")
    def _distinct(self) -> Utilities:
        if len(set(self.outcomes)) < len(self.outcomes):
            raise ValueError("outcomes names one twice; give each once")
        return self


class Control(Fitting):
    """Fine-tuning to an assembly's preferences, after the demonstrations: stages/training/sft/control.py."""

    kind: Literal["none", "soft", "sampled", "majority"] = "none"
    """soft: both options by their shares of the assembly; sampled: one option drawn by them; majority: the more frequent one."""
    outcomes: dict[Annotated[str, Field(min_length=1)], float] = Field(default_factory=dict)
    """Outcome -> the assembly's mean utility of it."""
    members: Count = 6
    """Of the assembly; their utilities differ by `spread`."""
    spread: NonNegative = 0.5
    """Standard deviation of a member's utility about the mean."""
    questions: Count = 300
    """Pairs to train on, all of them if there are no more."""
    valid_share: ValidShare = 0.2
    """Share of the pairs that measure agreement before and after."""
    rehearsal: NonNegative = 1.0
    """Weight of the loss of the demonstration that comes with each question in each order, which keeps what SFT has taught; 0:
    questions alone, in batches of the same size."""
    question: str = "which is better?"
    """As evaluate.utilities.question."""
    options: Options = Field(default_factory=lambda: ["A", "B"])
    """As evaluate.utilities.options."""

    @model_validator(mode="after")
    def _counts(self) -> Control:
        fields = type(self).model_fields.items()
        changed = sorted(name for name, one in fields if getattr(self, name) != one.get_default(call_default_factory=True))
        if self.kind == "none" and changed:
            raise ValueError(f"control.{changed[0]} has no effect: control.kind is none; set it to soft, or remove {changed[0]}")
        if self.kind != "none" and len(self.outcomes) < 4:
            raise ValueError("control.outcomes must name at least four outcomes with their utilities")
        return self
