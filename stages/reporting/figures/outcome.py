"""Figures of the evaluation: success with intervals per model and domain, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.reporting.results import journey, model_order, signed, success
from stages.reporting.style import CARD, WIDE, colour, domain_colour, domain_line, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS_PER_ROW = 2


def model_colour(model: str, domains: Sequence[str]) -> str:
    """Palette name of a model: a specialist has its domain's colour, `sft+q` that of `sft`, an unknown model is grey."""
    model = model.partition("+")[0]
    if model.startswith("rl@") and model[3:] in domains:
        return domain_colour(list(domains).index(model[3:]))
    return {"sft": "sft", "merged": "merged", "merged_linear": "merged"}.get(model, "base")


def _bars(axes: Any, evaluation: Mapping[str, Any], domain: str, domains: Sequence[str]) -> None:
    from matplotlib.patheffects import withStroke

    # A rim in the background colour makes intervals visible on bars of any colour.
    rim = [withStroke(linewidth=3.2, foreground=colour("surface"))]
    models = [name for name in model_order(list(evaluation["models"]), domains) if success(evaluation, name, domain)]
    for place, model in enumerate(models):
        estimate = success(evaluation, model, domain)
        assert estimate is not None
        tint = colour(model_colour(model, domains))
        face = "none" if model == "merged_linear" else tint
        alpha = 0.45 if model.startswith("rl@") and model[3:] != domain else 1.0
        axes.barh(place, 100 * estimate.mean, height=0.62, facecolor=face, edgecolor=tint, linewidth=1.4, alpha=alpha)
        low, high = 100 * estimate.low, 100 * estimate.high
        ends = ((low, -0.14), (low, 0.14), (low, 0.0), (high, 0.0), (high, -0.14), (high, 0.14))
        line = {"color": colour("ink"), "linewidth": 1.3, "solid_capstyle": "butt", "path_effects": rim}
        axes.plot([x for x, _ in ends], [place + y for _, y in ends], **line)
        beside: dict[str, Any] = {"xy": (100, place), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(f"{100 * estimate.mean:.0f} %", xytext=(36, 0), ha="right", fontsize=8.5, fontweight="bold", **beside)
        axes.annotate(f"{low:.0f}–{high:.0f}", xytext=(42, 0), ha="left", fontsize=7.5, color=colour("muted"), **beside)
    axes.set_yticks(range(len(models)), models)
    axes.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axes.set_ylim(len(models) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.spines["left"].set_color(colour("muted"))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("successful attempts, %", loc="left")


def success_bars(evaluation: Mapping[str, Any], shown: Sequence[str], domains: Sequence[str]) -> Figure:
    """Success per model with intervals, one panel per domain in `shown`; `domains` sets order and colours."""
    columns = min(len(shown), PANELS_PER_ROW)
    rows = math.ceil(len(shown) / PANELS_PER_ROW)
    count = max(len(evaluation["models"]), 3)
    width, height = CARD[0] * columns, 0.85 + 0.33 * count
    figure, axes = new_figure((width, rows * height), rows, columns)
    figure.set_layout_engine("constrained", wspace=0.06, hspace=0.06)
    panels = [axes] if rows == columns == 1 else list(axes.flat)
    for panel, domain in zip(panels, shown, strict=False):
        _bars(panel, evaluation, domain, domains)
        n = max((found.n for model in evaluation["models"] if (found := success(evaluation, model, domain))), default=0)
        panel.set_title(f"{domain}, {n} tasks")
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    return figure


def journey_lines(evaluation: Mapping[str, Any], domains: Sequence[str]) -> Figure:
    """Success with intervals on each domain: base, sft, its specialist, merged."""
    names = ["base", "sft", "rl", "merged"]
    figure, axes = new_figure(CARD)
    labels = []
    for index, domain in enumerate(domains):
        steps = journey(evaluation, domain)
        offset = 0.035 * (index - (len(domains) - 1) / 2)
        places = [names.index(model.split("@")[0]) + offset for model, _ in steps]
        means = [100 * estimate.mean for _, estimate in steps]
        below = [100 * (estimate.mean - estimate.low) for _, estimate in steps]
        above = [100 * (estimate.high - estimate.mean) for _, estimate in steps]
        axes.errorbar(
            places,
            means,
            yerr=[below, above],
            capsize=3,
            linewidth=2.2,
            elinewidth=1.2,
            label=domain,
            **{**domain_line(index), "markersize": 6},
        )
        if means:
            labels.append((means[-1], len(names) - 1, f"{domain}  {means[-1]:.0f} %", colour(domain_colour(index))))
    _label_ends(axes, labels)
    axes.set_xticks(range(4), ["base model", "fine-tuned", "specialist", "merged"])
    axes.tick_params(axis="x", labelcolor=colour("ink"), length=0)
    axes.set_xlim(-0.4, 3.4 + 0.1 * max(map(len, domains), default=0))
    axes.set_ylim(-3, 104)
    axes.set_title("Success, %")
    axes.grid(axis="x", visible=False)
    return figure


def _label_ends(axes: Any, labels: Sequence[tuple[float, float, str, str]], gap: float = 8.0) -> None:
    """Label line ends with (y, x, text, colour), at least `gap` per cent apart."""
    placed = -math.inf
    for y, x, text, tint in sorted(labels):
        placed = max(y, placed + gap)
        axes.text(x + 0.12, placed, text, va="center", ha="left", color=tint, fontweight="bold", fontsize=9)


def differences(comparisons: Sequence[Mapping[str, Any]], domains: Sequence[str]) -> Figure:
    """Paired differences in points with intervals; filled marks where the interval excludes zero."""
    ordered = sorted(
        comparisons, key=lambda item: list(domains).index(item["domain"]) if item["domain"] in domains else len(domains)
    )
    figure, axes = new_figure((WIDE[0], 0.8 + 0.3 * max(len(ordered), 2)))
    labels = []
    for place, item in enumerate(ordered):
        tint = colour(domain_colour(list(domains).index(item["domain"]) if item["domain"] in domains else 3))
        low, high, middle = (100 * item[key] for key in ("low", "high", "difference"))
        axes.plot([low, high], [place, place], color=tint, linewidth=2, solid_capstyle="round")
        face = tint if low > 0 or high < 0 else colour("surface")
        axes.plot([middle], [place], "o", markersize=6.5, color=tint, markerfacecolor=face, markeredgewidth=1.6)
        beside: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(signed(middle), (max(high, middle), place), fontsize=8, **beside)
        labels.append(f"{item['domain']}:  {item['a']} − {item['b']}")
    axes.axvline(0, color=colour("ink"), linewidth=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("paired difference in success, points")
    return figure


def by_difficulty(evaluation: Mapping[str, Any], domain: str, domains: Sequence[str]) -> Figure:
    """Success of base, sft, the domain's specialist and the merge by difficulty (in the domain's unit)."""
    figure, axes = new_figure(CARD)
    levels: list[str] = []
    for place, (model, _) in enumerate(journey(evaluation, domain)):
        shares = evaluation["models"][model][domain].get("by_difficulty") or {}
        levels = sorted({*levels, *shares}, key=float)
        points = sorted((float(level), 100 * row["success"]) for level, row in shares.items())
        style = {**domain_line(place), "color": colour(model_colour(model, domains)), "markersize": 5}
        label = "specialist" if model.startswith("rl@") else model
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, **style)
    axes.set_xticks([float(level) for level in levels], levels)
    axes.set_ylim(-3, 103)
    axes.set_xlabel(f"difficulty of a {domain} task")
    axes.set_title("Success, %")
    legend_above(axes)
    return figure
