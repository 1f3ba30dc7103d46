"""Comparing an answer with a reference: by rules, or by the probabilities of a generative verifier's labels (Su et al., Crossing
the Reward Bridge, arXiv 2503.23829). Pure functions.

p1 and p0 are the probabilities of the labels "right" and "wrong" as the verifier's next token, c is the label it draws.

    binary  r = 1[c is right]
    soft    r = p1 if c is right, 1 - p0 if c is wrong
    other   r = 0 if it draws anything else
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Score = Literal["soft", "binary"]
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of one answer. `drawn`: whether it drew the label "right", or "wrong"; None: anything else."""

    right: float
    wrong: float
    drawn: bool | None

    def score(self, kind: Score, other: float = 0.0) -> float:
        """See the module; `other` is the score of what is neither label."""
        if self.drawn is None:
            return other
        if kind == "binary":
            return float(self.drawn)
        return self.right if self.drawn else 1.0 - self.wrong


def verdict(log_right: float, log_wrong: float, uniform: float, renormalised: bool = False) -> Verdict:
    """The verdict that `uniform` in [0, 1) draws from the log-probabilities of the labels; `renormalised` over the two of them,
    also where both are too small for a probability above 0. Raises ValueError for NaN, and for two of minus infinity that are to
    be renormalised."""
    if math.isnan(log_right + log_wrong) or (renormalised and log_right == log_wrong == -math.inf):
        raise ValueError(f"log-probabilities of a verifier's labels are {log_right} and {log_wrong}; is its model broken?")
    largest = max(log_right, log_wrong) if renormalised else 0.0
    right, wrong = math.exp(log_right - largest), math.exp(log_wrong - largest)
    if renormalised:
        right, wrong = right / (right + wrong), wrong / (right + wrong)
    drawn = True if uniform < right else False if uniform < right + wrong else None
    return Verdict(right, wrong, drawn)


def last_line(text: str) -> str:
    """The last line that is not blank, without spaces around it; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def words(text: str) -> list[str]:
    """Words in lower case."""
    return _WORD.findall(text.lower())


def contains(reference: str, answer: str, most_words: int | None = None) -> bool:
    """Whether the words of the reference occur in the answer, one after the other. An answer of more than `most_words` words
    contains nothing: a list of candidates would contain every reference. An empty reference is contained in nothing."""
    wanted, found = words(reference), words(answer)
    if not wanted or (most_words is not None and len(found) > most_words):
        return False
    return any(found[start : start + len(wanted)] == wanted for start in range(len(found) - len(wanted) + 1))


def jaccard(reference: str, answer: str) -> float:
    """|A and B| / |A or B| of the sets of words; 0 if both are empty."""
    first, second = set(words(reference)), set(words(answer))
    return len(first & second) / len(first | second) if first | second else 0.0


def zscores(scores: Sequence[float]) -> list[float]:
    """(r - mean) / standard deviation with divisor n; all 0 where all scores are equal."""
    if not scores:
        return []
    mean = math.fsum(scores) / len(scores)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
    if deviation <= 1e-9 * max(abs(score) for score in scores):
        return [0.0] * len(scores)
    return [(score - mean) / deviation for score in scores]
