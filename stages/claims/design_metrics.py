"""Metrics of searches over agent designs (lane designs). Light to import."""

from __future__ import annotations

AFTER = (10, 20, 40)
"""Numbers of evaluations after which a search is scored."""
METRICS = (
    "area",
    "to_95",
    "rank_correlation",
    *(f"{name}.{count}" for name in ("best", "found", "regret") for count in AFTER),
)
"""`area`: mean over all evaluations of the best validation score so far; `to_95`: evaluations until it reaches 95 % of the
optimum (budget + 1 if it never does); `rank_correlation`: Spearman's, of the fitted value model on designs not evaluated (0
without one); after AFTER evaluations, `best`: the best validation score; `found`: panel success of that design; `regret`: its
distance from the best design on the panel."""
