"""The contract of judges: what they are asked, and what they answer.

A question shows one or two candidates with a rubric. pairwise: a score for each of two candidates; pointwise: a score for one;
checklist: for one candidate, whether it meets each item. Scores are on the rubric's scale, a checklist's are 0 or 1.

A judge never raises because of what a model or server does: a judgment that could not be made has a status other than OK and no
scores, so that the caller decides what a failure is worth (`rl.judge.on_failure`) and counts it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, Protocol

NO_REPLY = "(no reply)"
"""Shown as the answer of a candidate that has none."""
Kind = Literal["pairwise", "pointwise", "checklist"]


class Status(StrEnum):
    """What became of a judgment."""

    OK = "ok"
    NONSENSE = "nonsense"
    """A reply without the scores that were asked for."""
    REFUSAL = "refusal"
    """The model declined to judge."""
    TIMEOUT = "timeout"
    RATE_LIMIT = "rate_limit"
    UNAVAILABLE = "unavailable"
    """No connection, or an error of the server."""
    REJECTED = "rejected"
    """The server refused this one request, for example as too long."""
    BUDGET = "budget"
    """Not asked: the budget in calls or money was spent."""


@dataclass(frozen=True)
class Candidate:
    """What a judge sees of one episode: its answer, and its earlier turns without what the environment replied.

    `name` identifies the episode in tables and is never shown.
    """

    answer: str
    steps: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Rubric:
    """Criteria on a scale from 0 to `scale`. `process` criteria are about the steps, `answer` criteria about the answer; `items`
    are those of a checklist. `principles` say in words what is preferred; a judge that reads them judges by them.

    A score is recomputed from the criteria, never taken from the judge's own arithmetic (`combined`).
    """

    process: tuple[str, ...] = ()
    answer: tuple[str, ...] = ("relevance", "feasibility", "details", "clarity")
    items: tuple[str, ...] = ()
    process_weight: float = 0.0
    scale: int = 10
    principles: tuple[str, ...] = ()

    def combined(self, answer: Mapping[str, float], process: Mapping[str, float] | None = None) -> float:
        """s = round(w P + (1 - w) Q, 1), P and Q the rounded means of the scores of process and answer (arXiv 2601.06487), which
        may have criteria of the same name. Without a weight of the process s = Q.

        Raises KeyError for a missing criterion, ValueError for a score off the scale.
        """
        found = self._mean(self.answer, answer)
        if not self.process_weight:
            return float(found)
        weighed = self.process_weight * self._mean(self.process, process or {}) + (1 - self.process_weight) * found
        return round(weighed, 1)

    def _mean(self, criteria: tuple[str, ...], scores: Mapping[str, float]) -> int:
        for name in criteria:
            if not 0 <= float(scores[name]) <= self.scale:
                raise ValueError(f"{name} is {scores[name]}, not in 0 to {self.scale}")
        return round(sum(float(scores[name]) for name in criteria) / len(criteria))


@dataclass(frozen=True)
class Question:
    """One question to a judge. `repeat`: 0 for the first time that the same is asked, 1 for the second, and so on."""

    kind: Kind
    task_id: str
    prompt: str
    candidates: tuple[Candidate, ...]
    rubric: Rubric = Rubric()
    reference: str = ""
    repeat: int = 0

    @property
    def slots(self) -> int:
        """How many scores the answer has."""
        return len(self.rubric.items) if self.kind == "checklist" else len(self.candidates)

    @cached_property
    def key(self) -> str:
        """32 hex digits of everything that the judge may read, so not of the candidates' names."""
        shown = [[one.answer, list(one.steps)] for one in self.candidates]
        rubric = asdict(self.rubric)
        if not self.rubric.principles:
            del rubric["principles"]
        parts = [self.kind, self.task_id, self.prompt, shown, rubric, self.reference, self.repeat]
        return digest(parts)


def digest(value: Any) -> str:
    """32 hex digits of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")).hexdigest()[:32]


@dataclass(frozen=True)
class Cost:
    """What judgments cost: requests sent, tokens read and written, money in the currency of the judge's prices."""

    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    money: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.calls + other.calls,
            self.tokens_in + other.tokens_in,
            self.tokens_out + other.tokens_out,
            self.money + other.money,
        )


@dataclass(frozen=True)
class Judgment:
    """The answer to a question: `scores` [question.slots], empty unless the status is OK."""

    scores: tuple[float, ...] = ()
    reason: str = ""
    status: Status = Status.OK
    cost: Cost = field(default_factory=lambda: Cost(calls=1))

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


class Judge(Protocol):
    """Answers questions; the same question always gets the same answer."""

    name: str
    version: str
    """Changes with whatever changes answers: settings, weights, the served model's name."""
    sent: int
    """Requests, or passes of a model, that this process has made; stored and repeated answers are none."""

    def judge(self, questions: Sequence[Question]) -> list[Judgment]:
        """One judgment per question, in order. Raises JudgeError only for what no further question could pass."""
        ...

    def keep(self) -> None:
        """Make failures final that would be asked anew if the run stopped here: something was written that follows from them."""
        ...

    def close(self) -> None: ...


class JudgeError(RuntimeError):
    """Judging can't go on; the message says why and what to do."""


def swapped(question: Question) -> Question:
    """The same pairwise question with its candidates in the other order."""
    first, second = question.candidates
    return replace(question, candidates=(second, first))
