"""Matches: a pair of candidates judged in both orders.

    S_i = J(i, j)[first] + J(j, i)[second],  S_j = J(i, j)[second] + J(j, i)[first]

A bias added to whoever is shown first cancels in S_i - S_j. Without the swap, S is the judgment in one order, doubled, so that
scores stay on one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stages.judging.contract import Candidate, Judge, JudgeError, Judgment, Question, Rubric

OnFailure = Literal["tie", "drop_match", "abort"]
Asked = list[tuple[Question, Judgment]]
"""Questions and their judgments, for the table."""


@dataclass(frozen=True)
class Match:
    """Two candidates of one task, and the number of earlier matches of the same two."""

    task_id: str
    prompt: str
    first: Candidate
    second: Candidate
    rubric: Rubric
    reference: str = ""
    repeat: int = 0

    def question(self, in_order: bool) -> Question:
        """The pairwise question with `first` shown first, or shown second."""
        shown = (self.first, self.second) if in_order else (self.second, self.first)
        return Question("pairwise", self.task_id, self.prompt, shown, self.rubric, self.reference, self.repeat)


def play(
    judge: Judge, matches: Sequence[Match], swap: bool = True, on_failure: OnFailure = "tie"
) -> tuple[list[tuple[float, float] | None], Asked]:
    """(S_first, S_second) of each match, each in [0, 2 * scale], and what was asked.

    on_failure, of either order: tie, as if the judge gave both half the scale; drop_match: the result is None; abort: JudgeError.
    """
    questions = [match.question(in_order) for match in matches for in_order in ((True, False) if swap else (True,))]
    judgments = judge.judge(questions)
    asked = list(zip(questions, judgments, strict=True))
    per_match = 2 if swap else 1
    results = []
    for number, match in enumerate(matches):
        pair = judgments[number * per_match : (number + 1) * per_match]
        results.append(_result(match, pair, on_failure))
    return results, asked


def _result(match: Match, judgments: Sequence[Judgment], on_failure: OnFailure) -> tuple[float, float] | None:
    half = match.rubric.scale / 2
    scores = [slots_of(judgment, 2, half, match.task_id, on_failure) for judgment in judgments]
    if any(score is None for score in scores):
        return None
    known = [score for score in scores if score is not None]
    if len(known) == 1:
        return 2 * known[0][0], 2 * known[0][1]
    (one, other), (turned_other, turned_one) = known
    return one + turned_one, other + turned_other


def slots_of(judgment: Judgment, slots: int, neutral: float, task_id: str, on_failure: OnFailure) -> tuple[float, ...] | None:
    """A judgment's scores, or what a failure is worth. Raises JudgeError for on_failure abort."""
    if judgment.ok:
        return judgment.scores
    if on_failure == "abort":
        raise JudgeError(
            f"the judge failed on task {task_id} with {judgment.status} ({judgment.reason}), and rl.judge.on_failure is abort; "
            f"set it to tie or drop_match, or mend the judge"
        )
    return (neutral,) * slots if on_failure == "tie" else None
