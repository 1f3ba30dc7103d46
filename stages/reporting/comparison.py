"""`python -m stages.reporting.comparison FILE.json`: table and figure of a comparison of settings over seeds.

FILE.json, written by flows/compare.py, holds `settings` (name -> overrides), `seeds`, `domains`, `metric` and `scores` (setting
-> [runs, domains]). FILE.md and FILE.svg are written beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.evaluation.aggregates import Bounded, iqm, probability_of_improvement, stratified_bootstrap
from stages.evaluation.statistics import StatisticsError
from stages.records.episode import read_json
from stages.reporting.generated_blocks import markdown_table
from stages.reporting.style import colour, drawing, to_svg
from stages.runtime.command import command
from stages.runtime.files import atomic_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESAMPLES = 5000
SHARES = ("success", "accepted")
"""Metrics shown in per cent."""


@dataclass(frozen=True)
class Line:
    """One setting; `improvement` (over the first setting) is None for the first."""

    name: str
    overrides: list[str]
    scores: np.ndarray
    iqm: Bounded
    improvement: Bounded | None


def lines_of(comparison: Mapping[str, Any]) -> list[Line]:
    """Settings in order. Raises StatisticsError for scores that are not [runs, domains]."""
    scores = {name: np.asarray(rows, dtype=np.float64) for name, rows in comparison["scores"].items()}
    first = next(iter(scores))
    return [
        Line(
            name,
            comparison["settings"][name]["overrides"],
            rows,
            stratified_bootstrap(iqm, rows, resamples=RESAMPLES),
            None if name == first else stratified_bootstrap(probability_of_improvement, rows, scores[first], resamples=RESAMPLES),
        )
        for name, rows in scores.items()
    ]


def _bounded(found: Bounded, share: bool) -> str:
    scale, digits = (100, 1) if share else (1, 3)
    return f"{scale * found.value:.{digits}f} ({scale * found.low:.{digits}f} to {scale * found.high:.{digits}f})"


def table(comparison: Mapping[str, Any], lines: list[Line]) -> str:
    """Markdown: interquartile mean, probability of improvement over the first setting, mean per domain, overrides."""
    share = comparison["metric"] in SHARES
    unit, domains = ", %" if share else "", comparison["domains"]
    header = [
        "setting",
        f"IQM{unit} (95 %)",
        f"P(better than {lines[0].name})",
        *(f"{domain}{unit}" for domain in domains),
        "changes",
    ]
    body = []
    for line in lines:
        means = [f"{100 * mean:.1f}" if share else f"{mean:.3f}" for mean in line.scores.mean(axis=0)]
        better = "–" if line.improvement is None else _bounded(line.improvement, share=False)
        body.append(
            [f"`{line.name}`", _bounded(line.iqm, share), better, *means, ", ".join(f"`{one}`" for one in line.overrides) or "–"]
        )
    rows = markdown_table(header, body, "l" + "r" * (len(header) - 2))
    about = (
        f"{comparison['metric']} over {len(comparison['seeds'])} seeds (`{comparison['vary']}`) and {len(domains)} domain"
        f"{'s' if len(domains) > 1 else ''}: interquartile mean (IQM) with stratified bootstrap, and the probability that a run "
        f"outperforms one of `{lines[0].name}` (arXiv 2108.13264)."
    )
    return f"{rows}\n\n{about}\n"


def figure(comparison: Mapping[str, Any], lines: list[Line]) -> Figure:
    """Left: IQM with its interval and each run's mean. Right: probability of improvement over the first setting."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7.6, 0.9 + 0.45 * len(lines)), layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    scale = 100 if comparison["metric"] in SHARES else 1

    def bar(axes: Any, place: int, found: Bounded, scale: float, tint: str) -> None:
        span = [scale * found.low, scale * found.high]
        axes.plot(span, [place, place], color=colour(tint), linewidth=7, solid_capstyle="butt")
        axes.plot([scale * found.value] * 2, [place - 0.28, place + 0.28], color=colour("ink"), linewidth=1.6)

    for place, line in enumerate(lines):
        bar(left, place, line.iqm, scale, "sft")
        runs = scale * line.scores.mean(axis=1)
        left.plot(runs, [place + 0.33] * len(runs), ".", color=colour("muted"), markersize=4)
        if line.improvement is not None:
            bar(right, place, line.improvement, 1, "domain1")
    left.set_yticks(range(len(lines)), [line.name for line in lines])
    left.set_ylim(len(lines) - 0.4, -0.6)
    left.set_title(f"{comparison['metric']}{', %' if scale == 100 else ''}: IQM (bar: 95 %; dots: runs)")
    right.axvline(0.5, color=colour("muted"), linewidth=1, linestyle="--")
    right.set_xlim(-0.02, 1.02)
    right.set_title(f"P(better than {lines[0].name})")
    for axes in (left, right):
        axes.tick_params(axis="y", labelcolor=colour("ink"), length=0)
        axes.grid(axis="y", visible=False)
    return drawn


def write(path: Path) -> None:
    """FILE.md and FILE.svg beside FILE.json."""
    comparison = read_json(path)
    lines = lines_of(comparison)
    title = f"{comparison['metric']} of {', '.join(line.name for line in lines)}"
    with drawing():
        svg = to_svg(figure(comparison, lines), path.stem, title, standalone=True).text
    atomic_text(path.with_suffix(".svg"), svg)
    text = f"![{title}]({path.stem}.svg)\n\n{table(comparison, lines)}"
    atomic_text(path.with_suffix(".md"), text)


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.reporting.comparison", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    try:
        write(file)
    except (FileNotFoundError, KeyError, StatisticsError) as error:
        print(f"comparison: {file}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
