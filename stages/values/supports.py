"""Which supports make sense for the targets of a scalar head."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from stages.values.settings import HeadParams

TOLERANCE = 0.01
"""Share of the targets' range by which a support may move a target; more, and the head cannot say what it is taught."""
_POINTS = 20


def sigma(head: HeadParams) -> float:
    """hl_gauss: the Gaussian's standard deviation, in the values' unit."""
    return head.sigma_ratio * (head.v_max - head.v_min) / head.bins


def decoded(head: HeadParams, target: float) -> float:
    """What a head that has learnt `target` perfectly predicts: the mean of the encoded target."""
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
    """The target in [low, high] that the head moves furthest, and what it decodes as."""
    targets = [low + (high - low) * place / _POINTS for place in range(_POINTS + 1)]
    return max(((target, decoded(head, target)) for target in targets), key=lambda pair: abs(pair[0] - pair[1]))


def check_support(head: HeadParams, low: float, high: float, what: str) -> None:
    """Raise ValueError if a head that has learnt targets in [low, high] perfectly would still predict something else: they lie
    outside the support, a Gaussian is cut off at its end, or bins are too wide. `what`: what the targets are, for the message."""
    target, got = _worst(head, low, high)
    if abs(target - got) <= TOLERANCE * (high - low):
        return
    room = 4 * sigma(head) if head.loss == "hl_gauss" else 0.0
    if head.v_min <= low - room and head.v_max >= high + room:
        advice = f"its {head.bins} bins are too wide for sigma_ratio {head.sigma_ratio:g}: raise bins, or sigma_ratio to 0.75"
    else:
        advice = f"let v_min be at most {low - room:.3g} and v_max at least {high + room:.3g}"
        advice += " (4 sigma beyond the targets)" if room else ""
    raise ValueError(
        f"head: {what} lie in [{low:g}, {high:g}], and {head.loss} over [{head.v_min:g}, {head.v_max:g}] would give "
        f"{got:.3f} for {target:g}; {advice}"
    )
