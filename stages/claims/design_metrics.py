"""How a search over agent designs is judged: metrics of lane designs. Light to import."""

from __future__ import annotations

AFTER = (10, 20, 40)
"""Evaluations after which a search is judged."""
METRICS = (
    "area",
    "to_95",
    "rank_correlation",
    *(f"{name}.{count}" for name in ("best", "found", "regret") for count in AFTER),
)
"""`area`: mean, over all evaluations, of the best validation score so far; `to_95`: evaluations until it is 95 % of the best
there is (one more than the budget if it never is); `rank_correlation`: Spearman's, of the fitted value model on designs not
evaluated (0 without one); after so many evaluations `best`: that score; `found`: panel success of the design that has it;
`regret`: how far that is from the best there is on the panel."""
