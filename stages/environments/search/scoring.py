"""Scores of an answer: exact match, token F1, BLEU, subsequences; normalised as for SQuAD (Rajpurkar et al., 2016)."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case without punctuation, articles and repeated spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_DROP_PUNCTUATION)).split())


def stated_answer(action: str) -> str | None:
    """The normalised text of an action `answer <text>`; None for any other action."""
    verb, _, text = action.strip().partition(" ")
    return normalize(text) if verb.lower() == "answer" and text.strip() else None


def exact_match(answer: str, gold: str) -> float:
    """1 if the normalised texts are equal, else 0."""
    return float(normalize(answer) == normalize(gold))


def token_f1(answer: str, gold: str) -> float:
    """F1 = 2PR / (P + R) over the multisets of words; in [0, 1]."""
    given, wanted = normalize(answer).split(), normalize(gold).split()
    shared = sum((Counter(given) & Counter(wanted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(given), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for item in one:
        before, row = row, [0] * (len(other) + 1)
        for place, against in enumerate(other, start=1):
            row[place] = before[place - 1] + 1 if item == against else max(before[place], row[place - 1])
    return row[-1]


def answer_bleu(answer: str, gold: str, max_order: int = 4) -> float:
    """Length-aware BLEU over normalised words, in [0, 1] (arXiv 2512.07478 names it without a formula): n-gram orders only up to
    the shorter text's length, so that short answers can score.

    BP * exp(mean over n = 1 .. min(max_order, c, r) of ln p_n), p_n the clipped n-gram precision, BP = 1 if c >= r else
    exp(1 - r / c), for a candidate of c and a reference of r words; 0 if any p_n is 0 or the answer is empty.
    """
    given, wanted = normalize(answer).split(), normalize(gold).split()
    logs = []
    for order in range(1, min(max_order, len(given), len(wanted)) + 1):
        grams, known = (Counter(tuple(text[at : at + order]) for at in range(len(text) - order + 1)) for text in (given, wanted))
        hits = sum((grams & known).values())
        if not hits:
            return 0.0
        logs.append(math.log(hits / sum(grams.values())))
    if not logs:
        return 0.0
    return min(1.0, math.exp(1 - len(wanted) / len(given))) * math.exp(sum(logs) / len(logs))
