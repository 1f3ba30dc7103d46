"""A judge that is a program: it knows a planted quality and makes planted errors, so that tests and experiments know the truth.

    pairwise   s_1 = c + g (q_1 - q_2) + b + f_1 + e_1,   s_2 = c + g (q_2 - q_1) + f_2 + e_2
    pointwise  s = c_1 + g_1 q + f + e
    checklist  1[item met], each flipped with probability `flip`

e is normal with standard deviation `noise`, b the bias for the first position, f = length * words + praise * [praises itself].
Errors are counter-based draws of the question's key: the same question always has the same errors, whatever is asked beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from stages.judging.contract import Candidate, Cost, Judgment, Question, digest
from stages.judging.settings import ProgramFaults
from stages.seeding import stream

Quality = Callable[[Question, Candidate], float]
"""The planted quality of a candidate."""
Items = Callable[[Question, Candidate], Sequence[bool]]
"""Which of a checklist's items a candidate meets."""
_PRAISE = re.compile(r"\b(best|excellent|perfect|great|superb|outstanding) (answer|brief|reply|response|plan)\b", re.IGNORECASE)


def praises_itself(text: str) -> bool:
    """Whether a text calls itself good ("an excellent brief")."""
    return bool(_PRAISE.search(text))


class ProgramJudge:
    """See the module. `quality`: higher is better, with a spread of about 1."""

    name = "program"

    def __init__(self, faults: ProgramFaults, quality: Quality, seed: int, items: Items | None = None) -> None:
        self.faults, self.quality, self.items, self.seed = faults, quality, items, seed
        self.version = digest([faults.model_dump(mode="json"), seed])[:16]
        self.sent = 0

    def judge(self, questions: Sequence[Question]) -> list[Judgment]:
        self.sent += len(questions)
        return [self._judgment(question) for question in questions]

    def keep(self) -> None:
        """Nothing fails."""

    def close(self) -> None:
        """Holds nothing."""

    def _judgment(self, question: Question) -> Judgment:
        rng = stream("judge.program", self.seed, question.key)
        if question.kind == "checklist":
            return self._checked(question, [rng.random() < self.faults.flip for _ in question.rubric.items])
        values = [self.quality(question, candidate) for candidate in question.candidates]
        if question.kind == "pointwise":
            raw = [self.faults.pointwise_centre + self.faults.pointwise_gain * values[0]]
        else:
            gap = self.faults.gain * (values[0] - values[1])
            raw = [self.faults.centre + gap + self.faults.position, self.faults.centre - gap]
        scores = [
            self._scaled(score + self._favour(candidate) + rng.gauss(0.0, self.faults.noise), question)
            for score, candidate in zip(raw, question.candidates, strict=True)
        ]
        reason = ", ".join(f"quality {value:.3g}" for value in values)
        return Judgment(tuple(scores), reason, cost=Cost(calls=1))

    def _checked(self, question: Question, flipped: Sequence[bool]) -> Judgment:
        if self.items is None:
            raise ValueError("a program judge without `items` can't answer a checklist; give it the items' predicate")
        met = self.items(question, question.candidates[0])
        return Judgment(tuple(float(one != flip) for one, flip in zip(met, flipped, strict=True)), "items", cost=Cost(calls=1))

    def _favour(self, candidate: Candidate) -> float:
        """What the candidate's form adds to its score."""
        text = candidate.answer
        return self.faults.length * len(text.split()) + self.faults.praise * praises_itself(text)

    def _scaled(self, score: float, question: Question) -> float:
        """On the rubric's scale and in steps of `step`, where these are set."""
        if self.faults.clip:
            score = min(max(score, 0.0), float(question.rubric.scale))
        return round(score / self.faults.step) * self.faults.step if self.faults.step else score
