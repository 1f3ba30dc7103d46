"""Measures a judge on labelled pairs, asked as rl asks it: by the scheme, criteria, principles and references of its section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from stages.judging.agreement import Margin, against, kappa_below, read_labels
from stages.judging.contract import Cost, Judge, JudgeError, Judgment, Question
from stages.judging.groups import SINGLE, Scoring
from stages.judging.measures import order_measures
from stages.judging.orders import Asked
from stages.judging.preferences import both_orders
from stages.judging.principles import read_at_step
from stages.judging.settings import LabelledPairs, SampledPrinciples
from stages.judging.table import judgment_row


class Asking(Protocol):
    """Of section rl.judge: how the judge is asked."""

    @property
    def principles(self) -> SampledPrinciples | None: ...
    @property
    def references(self) -> bool: ...
    def scoring(self) -> Scoring: ...


def as_rl_asks(question: Question, params: Asking, seed: int) -> Question:
    """A pair with what the judge would read of it in the first training step. Answers of one turn have no process to score."""
    principles = read_at_step(params.principles, seed, 0, question.task_id)
    rubric = replace(params.scoring().rubric, process_weight=0.0, principles=principles)
    return replace(question, rubric=rubric, reference=question.reference if params.references else "")


def preferences_of(judge: Judge, questions: Sequence[Question], scheme: str) -> tuple[list[Margin], Asked]:
    """(s_12, s_21) of each pair, both for its first answer, and what was asked. Tournaments compare both in both orders. Schemes
    that judge each answer alone have no order: both are the difference of the scores, or of the shares of a checklist."""
    if scheme not in SINGLE:
        return both_orders(judge, questions)
    kind: Literal["pointwise", "checklist"] = "checklist" if scheme == "checklist" else "pointwise"
    shown = [replace(question, kind=kind, candidates=(one,)) for question in questions for one in question.candidates]
    asked = list(zip(shown, judge.judge(shown), strict=True))
    means = [_mean(judgment) for _, judgment in asked]
    pairs = zip(means[::2], means[1::2], strict=True)
    return [None if one is None or other is None else (one - other, one - other) for one, other in pairs], asked


def _mean(judgment: Judgment) -> float | None:
    return sum(judgment.scores) / len(judgment.scores) if judgment.ok else None


def measured(
    judge: Judge, params: Asking, seed: int, labels: Path, limit: int | None = None, alpha: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Agreement with the labelled pairs, failures and costs; and rows of the table of judgments. `alpha`: see `against`.

    Raises FileNotFoundError, ValueError for a file that has no pairs, and JudgeError.
    """
    questions, truth = read_labels(labels)
    questions, truth = questions[:limit], truth[:limit]
    scheme = params.scoring().scheme
    margins, asked = preferences_of(judge, [as_rl_asks(question, params, seed) for question in questions], scheme)
    judge.keep()
    rows = [judgment_row(judge, *one) for one in asked]
    cost = sum((judgment.cost for _, judgment in asked), Cost())
    statuses = [row["status"] for row in rows]
    found = {
        "scheme": scheme,
        **against(margins, truth, alpha),
        "position_bias": order_measures(rows)["position_bias"],
        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
        "calls": cost.calls,
        "tokens_in": cost.tokens_in,
        "tokens_out": cost.tokens_out,
        "money": cost.money,
    }
    return found, rows


def believed(judge: Judge, params: Asking, seed: int, given: LabelledPairs, root: Path) -> dict[str, Any]:
    """What `measured` finds by the settings `given`. Raises JudgeError if the judge agrees less than they demand."""
    found, _ = measured(judge, params, seed, root / given.path, given.limit)
    if (kappa := kappa_below(found, given.least_kappa)) is not None:
        raise JudgeError(
            f"rl.judge agrees with the labels in {given.path} with kappa {kappa:.2f} over "
            f"{found['compared']:.0f} pairs, and rl.judge.labelled_pairs.least_kappa is {given.least_kappa}: choose another "
            f"judge, or lower it"
        )
    return found
