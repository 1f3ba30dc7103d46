"""Texts as vectors, and the score of how well an agent follows its guidance (arXiv 2309.17176)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stages.control.advice.settings import Score
from stages.seeding import key64

UNKNOWN = 0.5
"""The score before there is any guidance or action."""


@lru_cache(4096)
def encoded(text: str, dimensions: int) -> NDArray[np.float32]:
    """A hashed bag of the text's words, of length 1: [dimensions]; 0 for an empty text. Do not change it in place."""
    vector = np.zeros(dimensions, np.float64)
    for word in text.lower().replace(",", " ").replace(".", " ").split():
        vector[key64("advice.word", word) % dimensions] += 1.0
    length = float(np.linalg.norm(vector))
    return (vector / length if length else vector).astype(np.float32)


def logistic(cosine: float, score: Score) -> float:
    """The score of a cosine; binary: 0 or 1."""
    value = 1.0 / (1.0 + math.exp(-score.slope * (cosine - score.centre)))
    return float(value >= 0.5) if score.kind == "binary" else value


def follows(actions: Sequence[str], guidance: str, dimensions: int, score: Score) -> float:
    """The score of the last actions under a guidance text; UNKNOWN where one of both is empty."""
    if not actions or not guidance:
        return UNKNOWN
    return logistic(float(encoded(" ".join(actions), dimensions) @ encoded(guidance, dimensions)), score)


def achievement_score(rates: Sequence[float]) -> float:
    """Crafter's score exp(mean ln(1 + s_i)) - 1 of success rates s_i in percent; at most their mean."""
    return math.exp(sum(math.log1p(rate) for rate in rates) / len(rates)) - 1.0
