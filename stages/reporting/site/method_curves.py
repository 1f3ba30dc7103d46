"""The learning curves of the methods' pages: of the board's galleries (experiments without claims, whose arms have the names of
cards), and of lane control."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from stages.claims.rows import Tables, curve_of
from stages.records.card import Card
from stages.reporting.board.rows import Entry
from stages.reporting.figures.claim_curves import Curve
from stages.reporting.figures.method_curve import method_curve, return_curve
from stages.reporting.style import drawing, to_svg

LANE = Path("reports/control/results.csv")
MEASURES = {
    "success": ("Success of the episodes played, %", 100.0),
    "pair_accuracy": ("Pairs whose winner the policy prefers, %", 100.0),
    "loss": ("Loss", 1.0),
}
"""What a curve shows, by column of reports/claims/curves: the first that the run has."""
CONTROL: Mapping[str, tuple[str, ...]] = {
    "arsq": ("arsq_detour", "sac_detour", "bc_detour"),
    "dsac_t": ("dsac_t", "sac"),
    "hl_gauss": ("dqn_hl_gauss", "dqn"),
    "lipschitz_mbrl": ("lipschitz_mbrl", "mbpo"),
    "vagram": ("vagram_pendulum", "mbpo"),
}
"""Methods of lane control: their runs in reports/control/params.yaml, and those to compare with."""
AT = "return at "
"""Figures of LANE that are points of a curve: `return at 500`."""

Picture = tuple[str, str]
"""The text below a figure, and the figure as an SVG file."""


def _svg(slug: str, title: str, figure: Callable[[], Figure]) -> str:
    with drawing():
        return to_svg(figure(), f"curve-{slug.replace('_', '-')}", f"Learning curve of {title}", standalone=True).text


def gallery_curves(root: Path, gallery: Entry) -> dict[str, tuple[str, str, Curve]]:
    """Arm -> (measure, axis of training, curve of its first seed)."""
    found = {}
    for name, steps in Tables.load(root, gallery.slug).curves.items() if gallery.saved is not None else ():
        arm, _, seed = name.rpartition("/")
        measure = next((one for one in MEASURES if any(step.get(one) is not None for step in steps)), None)
        if seed != "0" or measure is None:
            continue
        played = all(step["environment_steps"] for step in steps)
        places, values = curve_of(steps, measure, played)
        found[arm] = (measure, "environment steps" if played else "training steps", (places, values * MEASURES[measure][1]))
    return found


def gallery_pictures(root: Path, entry: Entry, cards: Mapping[str, Card]) -> dict[str, Picture]:
    """Card's slug -> its curve in front of those of the gallery's other methods that show the same."""
    curves, baseline = gallery_curves(root, entry), "grpo"
    pictures = {}
    for slug in sorted(set(curves) & set(cards)):
        measure, axis, _ = curves[slug]
        alike = {name: curve for name, (what, across, curve) in curves.items() if (what, across) == (measure, axis)}
        if measure == "loss":
            alike = {slug: alike[slug]}  # losses of two methods are not in one unit
        titles = (MEASURES[measure][0], axis)

        def figure(alike: Mapping[str, Curve] = alike, slug: str = slug, titles: tuple[str, str] = titles) -> Figure:
            return method_curve(alike, slug, baseline, titles)

        against = f", dashed: `{baseline}`" if baseline in alike and slug != baseline else ""
        others = ", thin: the other methods there" if len(alike) > 1 else ""
        text = (
            f"One run on `{entry.experiment.environment}`{against}{others}. It shows what to expect of a run, and is no evidence "
            f"for or against the method. `make claims METHOD={entry.slug}` repeats it."
        )
        pictures[slug] = (text, _svg(slug, cards[slug].title, figure))
    return pictures


def _lane(root: Path) -> dict[str, tuple[str, Curve, np.ndarray]]:
    """Method of the lane -> (task, curve of mean returns, lowest and highest return)."""
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    tasks = {}
    if not (root / LANE).exists():
        return {}
    with (root / LANE).open(encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            if row["figure"].startswith(AT):
                numbers = (row["figure"].removeprefix(AT), row["mean"], row["lowest"], row["highest"])
                points.setdefault(row["method"], []).append(tuple(map(float, numbers)))  # type: ignore[arg-type]
                tasks[row["method"]] = row["task"]
    arrays = {name: np.array(of).T for name, of in points.items()}
    return {name: (tasks[name], (of[0], of[1]), of[2:]) for name, of in arrays.items()}


def control_pictures(root: Path, cards: Mapping[str, Card]) -> dict[str, Picture]:
    """Card's slug -> the learning curve of its runs in lane control."""
    lane, pictures = _lane(root), {}
    for slug, names in CONTROL.items():
        if names[0] not in lane or slug not in cards:
            continue
        task = lane[names[0]][0]
        curves = {name: lane[name][1:] for name in names if name in lane and lane[name][0] == task}

        def figure(curves: Mapping[str, tuple[Curve, np.ndarray]] = curves) -> Figure:
            return return_curve(curves, ("Return of evaluations", "environment steps"))

        text = f"Mean over three seeds on `{task}`, and their range. `make control METHOD={names[0]}` repeats it."
        pictures[slug] = (text, _svg(slug, cards[slug].title, figure))
    return pictures


def method_pictures(root: Path, board: Mapping[str, Entry], cards: Mapping[str, Card]) -> dict[str, Picture]:
    """All of them, by the card's slug."""
    pictures = control_pictures(root, cards)
    for entry in board.values():
        if not entry.experiment.claims:
            pictures |= gallery_pictures(root, entry, cards)
    return pictures
