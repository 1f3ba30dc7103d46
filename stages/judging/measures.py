"""How good a judge is: agreement with other labels, sensitivity to order, ties and calibration. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

TIE = 1e-9
"""Scores that differ by at most this are tied."""


def verdict(first: float, second: float) -> int:
    """1 if the first score is higher, -1 if the second is, 0 for a tie."""
    return 0 if abs(first - second) <= TIE else 1 if first > second else -1


def cohen_kappa(one: Sequence[Any], other: Sequence[Any], weights: Literal["linear", "quadratic"] | None = None) -> float:
    """Cohen's kappa of two raters' labels of the same items; 1 if both give every item the same one label.

    Raises ValueError for unequal lengths or no items.
    """
    from sklearn.metrics import cohen_kappa_score

    if len(one) != len(other) or not one:
        raise ValueError(f"kappa compares labels of the same items; got {len(one)} and {len(other)}")
    if len({*one, *other}) == 1:
        return 1.0
    return float(cohen_kappa_score(list(one), list(other), weights=weights))


def krippendorff_alpha(
    ratings: Sequence[Sequence[float | None]], level: Literal["nominal", "ordinal", "interval", "ratio"] = "nominal"
) -> float:
    """Krippendorff's alpha of ratings[rater][item], None where a rater did not judge; 1 if no two ratings differ.

    Needs the extra `judging` (package krippendorff); raises ImportError that says so.
    """
    try:
        import krippendorff
    except ImportError as error:
        raise ImportError("Krippendorff's alpha needs the extra judging: pip install 'bellwether[judging]'") from error
    values = {value for row in ratings for value in row if value is not None}
    if len(values) == 1:
        return 1.0
    rows = [[math.nan if value is None else float(value) for value in row] for row in ratings]
    return float(krippendorff.alpha(reliability_data=rows, level_of_measurement=level))


def flip_rate(asked: Sequence[tuple[float, float]], turned: Sequence[tuple[float, float]]) -> float:
    """Share of pairs whose verdict depends on the order. `asked[n]`, `turned[n]`: scores of the same (first, second) candidate,
    shown in this and in the other order. A tie in one order only counts as a flip. 0 without pairs."""
    flips = [verdict(*one) != verdict(*other) for one, other in zip(asked, turned, strict=True)]
    return sum(flips) / len(flips) if flips else 0.0


def tie_rate(scores: Sequence[tuple[float, float]]) -> float:
    """Share of pairs with equal scores; 0 without pairs."""
    return sum(verdict(*pair) == 0 for pair in scores) / len(scores) if scores else 0.0


def brier_score(probabilities: Sequence[float], outcomes: Sequence[float]) -> float:
    """Mean squared difference of probabilities and outcomes (0, 1, or 0.5 for a tie)."""
    return sum((p - y) ** 2 for p, y in zip(probabilities, outcomes, strict=True)) / len(outcomes)


def calibration(
    probabilities: Sequence[float], outcomes: Sequence[float], bins: int = 10
) -> tuple[float, list[dict[str, float]]]:
    """Expected calibration error, and per bin of equal width that holds any: mean probability, share of outcomes, count.

    Raises ValueError for a probability outside [0, 1].
    """
    if wrong := [p for p in probabilities if not 0 <= p <= 1]:
        raise ValueError(f"probabilities must be in [0, 1], not {wrong[0]}")
    members: dict[int, list[tuple[float, float]]] = {}
    for p, y in zip(probabilities, outcomes, strict=True):
        members.setdefault(min(int(p * bins), bins - 1), []).append((p, y))
    rows, error = [], 0.0
    for _, pairs in sorted(members.items()):
        mean, share = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        rows.append({"probability": mean, "outcome": share, "count": float(len(pairs))})
        error += abs(mean - share) * len(pairs) / len(outcomes)
    return error, rows


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties with their mean rank; None for fewer than two items or a constant."""
    from scipy.stats import spearmanr

    if len(one) < 2 or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return float(spearmanr(one, other).statistic)


def order_measures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """From rows of a table of judgments: share of failures, and of the pairs asked in both orders, flips, ties and the mean
    advantage of the first position in points. A pair that was judged by several principles counts once for each."""
    pairs: dict[tuple[Any, ...], tuple[float, float]] = {}
    for row in rows:
        if row["kind"] == "pairwise" and row["status"] == "ok":
            key = (row["task_id"], row["repeat"], row["step"], tuple(row["principles"]), tuple(row["candidates"]))
            pairs.setdefault(key, (row["scores"][0], row["scores"][1]))
    asked, turned = [], []
    for (*same, names), found in sorted(pairs.items()):
        other = pairs.get((*same, names[::-1]))
        if other and names < names[::-1]:
            asked.append(found)
            turned.append(other[::-1])
    first = [one[0] - one[1] - (other[0] - other[1]) for one, other in zip(asked, turned, strict=True)]
    failed = sum(row["status"] != "ok" for row in rows)
    return {
        "failures": failed / len(rows) if rows else 0.0,
        "flip_rate": flip_rate(asked, turned),
        "tie_rate": tie_rate([(a[0] + b[0], a[1] + b[1]) for a, b in zip(asked, turned, strict=True)]),
        "position_bias": sum(first) / len(first) / 2 if first else 0.0,
        "pairs": float(len(asked)),
    }
