"""Metrics of labels and pairs of search trees against exact values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stages.annotation.labels import first_error, hard, label_rows
from stages.annotation.nodes import Row, ended, path_to, trees_of
from stages.annotation.pairs import pair_rows

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

WORLDS = ("known", "keydoor")
METRICS = (
    "rmse_policy",
    "rmse_best",
    "rank_policy",
    "rank_best",
    "pair_accuracy",
    "pair_accuracy_policy",
    "right_pairs",
    "first_error_accuracy",
    "trees_with_pairs",
    "labels",
    "tokens",
)
"""Per world; see `score_labels`."""
Exact = Callable[[Sequence[Row], int], tuple[float, float]]
"""(a tree, a node of it) -> Q of the policy and Q* of the action that led there."""


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's; 0 if one of the two is constant."""
    a, b = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale > 0 else 0.0


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's; 0 if one of the two is constant."""
    from scipy.stats import rankdata

    if len(first) < 2:
        return 0.0
    return correlation(rankdata(first), rankdata(second))


def first_error_accuracy(trees: Iterable[Sequence[Row]], exact: Exact) -> float:
    """Share of failed leaves whose first error is identified: the first step after which the policy never succeeds, by exact Q,
    is also the first below which the tree has no successful leaf (OmegaPRM's first wrong step). 0 without failed leaves."""
    hits = []
    for tree in trees:
        alive = [not row["node"] or exact(tree, row["node"])[0] > 1e-9 for row in tree]
        for end in (row["node"] for row in tree if ended(row) and row["node"] and row["N"] and not hard(row)):
            hits.append(first_error(tree, end) == next((node for node in path_to(tree, end)[1:] if not alive[node]), None))
    return sum(hits) / len(hits) if hits else 0.0


def score_labels(rows: Sequence[Row], params: Annotate, exact: Exact, tokens: int) -> dict[str, float]:
    """METRICS of trees (rows of `node_schema`) that took `tokens` policy tokens.

    rmse_policy, rmse_best: root mean squared difference of the labels' q and Q of the policy, Q*, over labelled actions that do
    not end their episode; rank_*: Spearman's correlation with them. pair_accuracy: share of the pairs whose winner has the higher
    Q*, equal ones counting half; pair_accuracy_policy: the same by Q of the policy; right_pairs: pairs right by Q* less wrong
    ones, per 1,000 tokens; first_error_accuracy: see there; trees_with_pairs: share of them; labels: labelled actions per 1,000
    tokens. Without labels the differences are 1 and the correlations 0; without pairs the accuracy is one half.
    """
    trees = trees_of(rows)
    values = [
        (label["q"], *exact(trees[label["task_id"]], label["node"]))
        for label in label_rows(rows, params)
        if label["node"] and not ended(trees[label["task_id"]][label["node"]])
    ]
    given, policy, best = (np.array(column) for column in zip(*values, strict=True)) if values else (np.zeros(0),) * 3
    pairs = pair_rows(rows, params)
    sides = [[exact(trees[pair["task_id"]], pair[side]) for side in ("win", "lose")] for pair in pairs]
    signs, by_policy = (np.sign(np.round([win[of] - lose[of] for win, lose in sides], 9)) for of in (1, 0))
    return {
        "rmse_policy": float(np.sqrt(((given - policy) ** 2).mean())) if values else 1.0,
        "rmse_best": float(np.sqrt(((given - best) ** 2).mean())) if values else 1.0,
        "rank_policy": rank_correlation(given, policy),
        "rank_best": rank_correlation(given, best),
        "pair_accuracy": float((signs.mean() + 1) / 2) if pairs else 0.5,
        "pair_accuracy_policy": float((by_policy.mean() + 1) / 2) if pairs else 0.5,
        "right_pairs": float(1000 * signs.sum() / tokens),
        "first_error_accuracy": first_error_accuracy(trees.values(), exact),
        "trees_with_pairs": len({pair["task_id"] for pair in pairs}) / len(trees),
        "labels": 1000 * len(values) / tokens,
        "tokens": float(tokens),
    }
