"""The figure of the benchmarks: ratios with their spread, and how three costs grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.reporting.style import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, float]
WIDTH = 8.6


def _ratios(axes: Any, summary: Mapping[str, Any], names: Sequence[str]) -> None:
    """A bar per scenario on a log axis, from 1 to the median ratio, with the range of ratios."""
    from matplotlib.patheffects import withStroke

    rim = [withStroke(linewidth=3.2, foreground=colour("surface"))]
    for place, name in enumerate(names):
        ratio = summary[name]["ratio"]
        tint = colour("sft" if ratio["median"] >= 1 else "domain0")
        axes.barh(place, ratio["median"] - 1, left=1, height=0.62, color=tint)
        axes.plot([ratio["low"], ratio["high"]], [place, place], color=colour("ink"), linewidth=1.4, path_effects=rim)
        beside: dict[str, Any] = {"xy": (1.0, place), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(f"{ratio['median']:.3g}", xytext=(8, 0), va="center", fontweight="bold", annotation_clip=False, **beside)
    low = min(0.5, *(summary[name]["ratio"]["low"] for name in names))
    high = max(2.0, *(summary[name]["ratio"]["high"] for name in names))
    axes.set_xscale("log")
    axes.set_xlim(low / 1.1, high * 1.15)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low / 1.1 <= tick <= high * 1.15]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color=colour("muted"), linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axes.grid(axis="y", visible=False)
    axes.set_title("Speed-up over the alternative (bar: median, line: lowest to highest)")


def _growth(axes: Any, rows: Sequence[Row], x: str, lines: Mapping[str, str], scale: float = 1.0) -> None:
    """Lines on log-log axes, with linear growth from the first point for reference."""
    places = [row[x] / scale for row in rows]
    first = rows[0][next(iter(lines))]
    axes.plot(places, [first * place / places[0] for place in places], color=colour("muted"), linestyle=":", label="linear")
    for (name, label), tint, marker in zip(lines.items(), ("sft", "domain0"), ("o", "s"), strict=False):
        axes.plot(places, [row[name] for row in rows], color=colour(tint), marker=marker, label=label)
        if "low" in rows[0]:
            axes.fill_between(places, [row["low"] for row in rows], [row["high"] for row in rows], color=colour(tint), alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = places[:: -(-len(places) // 6)]
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(loc="upper left")


PANELS: Mapping[str, tuple[str, str, str, Mapping[str, str], float]] = {
    "scaling_rollouts": ("Rollouts/s by slots", "slots", "slots", {"rollouts_per_s": "measured"}, 1.0),
    "scaling_steps": ("Training step, s", "tokens", "thousand tokens", {"seconds": "measured"}, 1e3),
    "scaling_merges": ("RAM merge, s", "bytes", "GB per model", {"ours_seconds": "ours", "theirs_seconds": "mergekit"}, 1e9),
}


WORKERS = ("rollout", "annotate", "rl", "evaluate")
"""Stages in the table `workers`."""


def _workers(axes: Any, rows: Sequence[Row]) -> None:
    """Speed-up by workers: Amdahl's law as lines, measurements as points with their range."""
    counts = [row["workers"] for row in rows]
    axes.plot(counts, counts, color=colour("muted"), linestyle=":", label="linear")
    for stage in WORKERS:
        axes.plot(counts, [row[stage] for row in rows], color=colour("muted"), linewidth=0.8)
        axes.annotate(stage, (counts[-1], rows[-1][stage]), xytext=(4, 0), textcoords="offset points", va="center", fontsize=6)
    axes.plot(counts, [row["together"] for row in rows], color=colour("sft"), label="model, together")
    measured = [row for row in rows if "measured" in row]
    spread = [[row["measured"] - row["low"] for row in measured], [row["high"] - row["measured"] for row in measured]]
    places, values = [row["workers"] for row in measured], [row["measured"] for row in measured]
    axes.errorbar(places, values, spread, color=colour("domain0"), fmt="o", label="measured, together")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [f"{count:g}" for count in counts])
    axes.set_yticks(counts, [f"{count:g}" for count in counts])
    axes.set_xlim(0.9, counts[-1] * 2.6)
    axes.minorticks_off()
    axes.legend(loc="upper left")


def draw(summary: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]) -> Figure:
    """Top: ratios. Below: a panel per table of PANELS, then that of the workers."""
    from matplotlib.figure import Figure

    names = [name for name in summary if summary[name]["ratio"]]
    shown = [name for name in PANELS if len(tables.get(name, ())) > 1]
    heights = [0.7 + 0.27 * len(names), *([2.5] if shown else []), *([2.9] if tables.get("workers") else [])]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), max(len(shown), 1), height_ratios=heights)
    _ratios(figure.add_subplot(grid[0, :]), summary, names)
    for place, name in enumerate(shown):
        title, x, label, lines, scale = PANELS[name]
        axes = figure.add_subplot(grid[1, place])
        _growth(axes, tables[name], x, lines, scale)
        axes.set_title(title)
        axes.set_xlabel(label, loc="left")
    if tables.get("workers"):
        axes = figure.add_subplot(grid[-1, :])
        _workers(axes, tables["workers"])
        axes.set_title("Speed-up of the default run's stages by workers (beyond the measured points: Amdahl's law)")
        axes.set_xlabel("workers", loc="left")
    return figure
