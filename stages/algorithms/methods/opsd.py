"""OPSD: the policy learns from itself with a solution in the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.card import Card, Composition
from stages.algorithms.methods import grpo
from stages.algorithms.parts.teacher import with_teacher
from stages.runtime.validation import ParamsError, Positive, Section, Share

if TYPE_CHECKING:
    from stages.algorithms.settings import Rl

CARD = Card(
    slug="opsd",
    title="On-policy self-distillation",
    paper="Zhao et al., OPSD, arXiv 2601.18734; the mixture with outcomes: Huebotter et al., SDPO, arXiv 2601.20802",
    equation="pi_T = the same model with a solution of the task in its first message; A_t = outcome * A_GRPO + (1 - outcome) * "
    "(log pi_T(y_t) - log pi_old(y_t)): in expectation the gradient of KL(pi || pi_T) of each token of the policy's own episodes",
    assumptions="a model that can use a solution in its context. The papers minimise divergences over many of the most likely "
    "tokens; the estimate from the drawn token alone, its clip (settings.clip) and the text of the hint are ours. The teacher is "
    "the start policy as in OPSD's experiments; settings.teacher current is its Algorithm 1",
    reduces_to="settings.outcome 1: GRPO; no solution known for a task: outcome times GRPO there",
    tested_by="tests/training/test_opsd.py",
    switch="rl.algorithm: opsd",
)


class Settings(Section):
    source: Literal["demonstrations", "trees"] = "demonstrations"
    """Where solutions come from: the expert's demonstrations of curate, or the correct paths of annotate's trees, of each task
    that with the fewest turns. Tasks without one are learned by their outcomes alone."""
    teacher: Literal["start", "current"] = "start"
    """Whose weights read the solution: the policy before rl, or the policy before the step."""
    outcome: Share = 0.0
    """Weight of GRPO's advantages; the rest is the teacher's."""
    clip: Positive = 5.0
    """Largest difference of log-probabilities, in nats."""
    hint: Annotated[str, Field(min_length=1)] = "One way to solve it:\n{solution}"
    """Added to the task's first message; {solution} are the actions, a line each."""

    @field_validator("hint")
    @classmethod
    def _placeholder(cls, value: str) -> str:
        if "{solution}" not in value:
            raise ValueError("must have {solution}, where the actions go")
        return value


def credit(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    return with_teacher(batch, rl.settings.outcome, rl.settings.clip)


def check(given: Rl, rl: Rl) -> None:
    if rl.external.per_group:
        raise ParamsError(
            "rl.external.per_group puts demonstrations into the groups, and algorithm opsd puts them into the teacher's context: "
            "set per_group to 0, or algorithm to rl_plus"
        )


COMPOSITION = Composition(
    card=CARD,
    parts=grpo.COMPOSITION.parts,
    pieces={"credit": credit},
    settings=Settings,
    teacher=lambda rl: True,
    check=check,
)
