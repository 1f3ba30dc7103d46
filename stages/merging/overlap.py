"""Overlap of two models' changed weights beside that of independent ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def chance_lift(diagnostics: Mapping[str, Any], a: str, b: str) -> float | None:
    """Weights that both models changed, relative to sum_g n_g p_a(g) p_b(g) over the groups g of layer and module, where n is the
    number of weights and p a model's changed share: what independent changes would have in common. None without changes."""
    (pair,) = (one for one in diagnostics["pairs"] if {one["a"], one["b"]} == {a, b})
    expected = 0.0
    for group in diagnostics["groups"]:
        shares = group["changed_fraction"]
        expected += group["entries"] * (shares[a] or 0.0) * (shares[b] or 0.0)
    return pair["overlap"] / expected if expected else None
