"""Cells of the tables that index and experiment pages share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.claims.experiment import is_share
from stages.reporting.board.rows import NOT_JUDGED, NOTHING, Row
from stages.runtime.speed import duration


def says(row: Row) -> str:
    """The claim, marked if it is exploratory."""
    return f"{row.claim.says} *(exploratory)*" if row.claim.exploratory else row.claim.says


def verdict(row: Row) -> str:
    return row.verdict if row.verdict == NOT_JUDGED else f"**{row.verdict}**"


def effect(row: Row) -> str:
    return row.judged["effect"] if row.judged is not None else NOTHING


def difference(row: Row) -> str:
    """With its interval and, unless it is in points, the metric."""
    unit = "" if row.judged is None or is_share(row.claim.metric) else f" `{row.claim.metric}`"
    return row.difference + unit


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.0005 else f"{p:.3f}"


def p_values(row: Row) -> tuple[str, str]:
    """p and the corrected p, bold if the difference is kept; dashes for a claim that p does not test."""
    if row.judged is None or row.correction is None:
        return NOTHING, NOTHING
    corrected, kept = row.correction
    return p_value(row.judged["p"]), f"**{p_value(corrected)}**" if kept else p_value(corrected)


def cost(environment_steps: int, seconds: float) -> str:
    """`605k environment steps, 34 min 05 s`."""
    steps = f"{environment_steps / 1000:,.0f}k environment steps, " if environment_steps else ""
    return steps + duration(seconds)


def experiment_cost(saved: Mapping[str, Any]) -> str:
    return cost(saved["cost"]["environment_steps"], saved["cost"]["seconds"])
