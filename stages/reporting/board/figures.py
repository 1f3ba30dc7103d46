"""The figures of the board's pages: the forest plot of all judged claims, and the learning curves of each experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.claims.experiment import FOLDER, Experiment, is_share
from stages.claims.rows import Tables, curve_of
from stages.reporting.board.index import FAMILIES
from stages.reporting.board.rows import Row
from stages.reporting.figures.claim_curves import Curve, learning_curves
from stages.reporting.figures.forest import Mark, Panel, forest
from stages.reporting.figures.spending import spending
from stages.reporting.style import drawing, to_svg

FOREST = FOLDER / "figures" / "board.svg"
LIMITS = (40.0, 8.0)
"""Largest axes, in points and in margins."""
LEAST = (10.0, 2.0)
TITLE = "Differences of all judged claims, with their intervals"


def curves_figure(slug: str) -> Path:
    """The figure of an experiment's learning curves, relative to the checkout."""
    return FOLDER / "figures" / f"{slug}_curves.svg"


def tradeoff_figure(slug: str) -> Path:
    """The figure of an experiment's cost against success, relative to the checkout."""
    return FOLDER / "figures" / f"{slug}_tradeoff.svg"


def _marks(found: list[Row], shares: bool) -> dict[str, list[Mark]]:
    """The judged claims about shares, in points, or about other metrics, in multiples of their margin; by family."""
    marks: dict[str, list[Mark]] = {}
    for name, title in FAMILIES.items():
        for row in found:
            claim, judged = row.claim, row.judged
            if row.experiment.family != name or judged is None or is_share(claim.metric) != shares:
                continue
            unit = 0.01 if shares else claim.margin
            numbers = [judged[key] / unit for key in ("difference", "low", "high")] + [claim.margin / unit]
            label = f"{row.slug} {row.number}: {claim.arm} − {claim.against}"
            marks.setdefault(title, []).append(Mark(label, row.verdict, *numbers))
    return marks


def _limit(families: Mapping[str, list[Mark]], least: float, most: float) -> float:
    ends = [abs(end) for marks in families.values() for mark in marks for end in (mark.low, mark.high)]
    return min(most, max(least, 1.05 * max(ends)))


def forest_svg(found: list[Row]) -> str | None:
    """The forest plot as an SVG file; None before the first verdict."""
    axes = (
        ("Success and other shares", "difference in points", True),
        ("Other metrics", "difference in margins of the claim", False),
    )
    panels = []
    for (title, unit, shares), least, most in zip(axes, LEAST, LIMITS, strict=True):
        if marks := _marks(found, shares):
            panels.append(Panel(title, unit, marks, _limit(marks, least, most)))
    if not panels:
        return None
    with drawing():
        return to_svg(forest(panels), "forest", TITLE, standalone=True).text


def tradeoff_svg(slug: str, experiment: Experiment, saved: Mapping[str, Any]) -> str | None:
    """Cost against success of the arms in `tradeoff`, means over seeds with their ranges, as an SVG file; None before every one
    of them has a run."""
    points = {}
    for arm in experiment.tradeoff:
        runs = [run["metrics"] for name, run in saved["runs"].items() if name.rpartition("/")[0] == arm]
        found = [[run[metric] for run in runs if metric in run] for metric in ("panel.cost", "panel.success")]
        if not all(found):
            return None
        points[arm] = tuple({"mean": fmean(of), "low": min(of), "high": max(of)} for of in found)
    if not points:
        return None
    title = f"Cost against success of {experiment.method}"
    with drawing():
        figure = spending(points, line=True)
        return to_svg(figure, f"tradeoff-{slug.replace('_', '-')}", title, standalone=True).text


def read_curves(root: Path, slug: str, experiment: Experiment) -> tuple[dict[str, list[Curve]], str]:
    """(arm -> success along training of each seed, the unit of training: steps in the environment, or of the optimiser if an arm
    counts none). Arms without successes while training lack."""
    runs = Tables.load(root, slug).curves
    rows = [row for run in runs.values() for row in run if row["success"] is not None]
    counted = all(row["environment_steps"] for row in rows)
    found: dict[str, list[Curve]] = {}
    for name, steps in runs.items():
        arm, curve = name.rpartition("/")[0], curve_of(steps, "success", counted)
        if arm in experiment.arms and len(curve[0]):
            found.setdefault(arm, []).append(curve)
    return {arm: found[arm] for arm in experiment.arms if arm in found}, "environment steps" if counted else "training steps"


def curves_svg(slug: str, method: str, curves: Mapping[str, list[Curve]], unit: str) -> str:
    """Learning curves as an SVG file."""
    with drawing():
        key = f"curves-{slug.replace('_', '-')}"
        return to_svg(learning_curves(curves, unit), key, f"Learning curves of {method}", standalone=True).text
