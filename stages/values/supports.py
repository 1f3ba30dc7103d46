"""Checks that a scalar head's support fits its targets."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from stages.values.settings import HeadParams

TOLERANCE = 0.01
"""Largest error of a perfectly learnt target, as a fraction of the targets' range."""
_POINTS = 20


def sigma(head: HeadParams) -> float:
    """hl_gauss: the Gaussian's standard deviation, in units of the values."""
    return head.sigma_ratio * (head.v_max - head.v_min) / head.bins


def decoded(head: HeadParams, target: float) -> float:
    """The prediction of a head that has learnt `target` perfectly: the mean of the encoded target."""
    if head.loss == "mse":
        return target
    target = min(max(target, head.v_min), head.v_max)
    if head.loss != "hl_gauss":
        return target
    width = (head.v_max - head.v_min) / head.bins
    scale = sigma(head) * math.sqrt(2.0)
    edges = [math.erf((head.v_min + width * edge - target) / scale) for edge in range(head.bins + 1)]
    mass = [upper - lower for lower, upper in pairwise(edges)]
    centres = (head.v_min + width * (place + 0.5) for place in range(head.bins))
    return sum(share * centre for share, centre in zip(mass, centres, strict=True)) / sum(mass)


@lru_cache(256)
def _worst(head: HeadParams, low: float, high: float) -> tuple[float, float]:
    """The target in [low, high] with the largest decoding error, and its decoded value."""
    targets = [low + (high - low) * place / _POINTS for place in range(_POINTS + 1)]
    return max(((target, decoded(head, target)) for target in targets), key=lambda pair: abs(pair[0] - pair[1]))


def check_support(head: HeadParams, low: float, high: float, what: str) -> None:
    """Raise ValueError if even a perfectly trained head would mispredict targets in [low, high]: they are outside the support, a
    Gaussian is cut off at its end, or bins are too wide. `what`: name of the targets, for the message."""
    target, got = _worst(head, low, high)
    if abs(target - got) <= TOLERANCE * (high - low):
        return
    room = 4 * sigma(head) if head.loss == "hl_gauss" else 0.0
    if head.v_min <= low - room and head.v_max >= high + room:
        advice = f"its {head.bins} bins are too wide for sigma_ratio {head.sigma_ratio:g}: raise bins, or sigma_ratio to 0.75"
    else:
        advice = f"set v_min to at most {low - room:.3g} and v_max to at least {high + room:.3g}"
        advice += " (4 sigma beyond the targets)" if room else ""
    raise ValueError(
        f"head: {what} are in [{low:g}, {high:g}], and {head.loss} over [{head.v_min:g}, {head.v_max:g}] would predict "
        f"{got:.3f} for {target:g}; {advice}"
    )
