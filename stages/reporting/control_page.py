"""The page of lane control: learning curves, comparisons, data sets, exact worlds, films. One self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from stages.control.lane.settings import Lane
from stages.control.lane.statistics import improvement, iqm_curve, last_scores
from stages.evaluation.aggregates import Bounded, iqm, stratified_bootstrap
from stages.reporting.blocks import Block, Figures, Heading, Section, Table, draw, number, slug
from stages.reporting.figures.control import control_curves
from stages.reporting.style import css_variables
from stages.reporting.template import template

Runs = Mapping[str, Mapping[str, Any]]


def interval(found: Bounded, digits: int = 1) -> str:
    return f"{found.value:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def title_of(lane: Lane, name: str) -> str:
    return lane.methods[name].title or name


def played(lane: Lane, runs: Runs) -> dict[str, list[str]]:
    """Methods with learning curves by what they are compared on: a task, or a data set."""
    found: dict[str, list[str]] = {}
    for name, run in runs.items():
        if run["returns"] and run["returns"][0]:
            data = lane.methods[name].settings.get("dataset") if run["problem"] == "offline" else None
            found.setdefault(data or run["task"], []).append(name)
    return found


def learning_section(lane: Lane, runs: Runs) -> Section:
    """Curves, ends and probabilities of improvement of each group of methods."""
    intro = (
        f"Interquartile means over {lane.seeds} seeds, with 95 % bootstrap intervals. Each evaluation plays new episodes with "
        "the greedy policy. The end of a run is the mean of its evaluations in the second half."
    )
    blocks: list[Block] = []
    for group, names in played(lane, runs).items():
        offline = runs[names[0]]["problem"] == "offline"
        curves = {title_of(lane, name): (runs[name]["steps"], iqm_curve(runs[name]["returns"])) for name in names}
        caption = f"Return while learning{' from the data set' if offline else ''}."
        across = "updates" if offline else "environment steps"
        blocks.append(Heading(group))
        blocks.append(Figures([draw(f"curve-{slug(group)}", caption, control_curves, curves, across)]))
        blocks.append(ends(lane, runs, names))
    return Section("learning", "Learning curves", intro, blocks)


def ends(lane: Lane, runs: Runs, names: Sequence[str]) -> Table:
    """How runs end, and the probability that one ends higher than one of the group's first method."""
    rows = []
    for name in names:
        scale = lane.scales.get(runs[name]["task"])
        scores = last_scores(runs[name])
        found = stratified_bootstrap(iqm, scores, resamples=1000)
        share = f"{100 * scale.normalised(found.value):.0f} %" if scale else "–"
        better = "–" if name == names[0] else interval(improvement(runs[name], runs[names[0]]), 2)
        digits = 1 if max(abs(found.low), abs(found.high)) >= 10.0 else 2
        rows.append([title_of(lane, name), interval(found, digits), share, better])
    header = ("method", "return at the end", "of the scale", f"P(better than {title_of(lane, names[0])})")
    return Table("Ends of runs", header, rows)


def data_section(data: Runs) -> Section | None:
    if not data:
        return None
    rows = [
        [name, found["task"], number(one["episodes"]), number(one["steps"]), f"{one['mean_return']:.1f}", one["sha256"][:12]]
        for found in data.values()
        for name, one in found["sets"].items()
    ]
    intro = "Episodes of our agents, in Minari's format: minari.load_dataset reads them with MINARI_DATASETS_PATH=data/control."
    header = ("data set", "task", "episodes", "steps", "mean return", "SHA-256")
    return Section("data", "Data sets", intro, [Table("All data sets", header, rows, text_columns=2, left=(5,))])


def exact_section(lane: Lane, runs: Runs) -> Section | None:
    """Figures of the problems that are evaluated exactly: their mean and range over seeds."""
    blocks: list[Block] = []
    groups: dict[str, list[str]] = {}
    for name, run in runs.items():
        if not (run["returns"] and run["returns"][0]):
            groups.setdefault(run["problem"], []).append(name)
    for problem, names in groups.items():
        figures = list(runs[names[0]]["figures"])
        rows = [
            [figure.replace("_", " "), *(spread(runs[name]["figures"].get(figure, [])) for name in names)] for figure in figures
        ]
        blocks.append(Table(problem.replace("_", " "), ("", *(title_of(lane, name) for name in names)), rows))
    if not blocks:
        return None
    intro = "Problems whose answers are known: what is learnt is compared with them. Mean over seeds, and range."
    return Section("exact", "Exact worlds", intro, blocks)


def spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean, low, high = sum(values) / len(values), min(values), max(values)
    return number(mean) if low == high else f"{number(mean)} ({number(low)} to {number(high)})"


def results_table(runs: Runs) -> str:
    """CSV: method, problem, task, figure, mean over seeds, lowest, highest; to six digits. A learning curve's figures are
    `return at 500`, after 500 steps."""
    rows = [("method", "problem", "task", "figure", "mean", "lowest", "highest")]
    for name, run in runs.items():
        curve = zip(run["steps"], zip(*run["returns"], strict=True), strict=False)
        for figure, values in [*run["figures"].items(), *((f"return at {step}", values) for step, values in curve)]:
            found = (sum(values) / len(values), min(values), max(values))
            rows.append((name, run["problem"], run["task"], figure, *(f"{value:.6g}" for value in found)))
    return "".join(",".join(row) + "\n" for row in rows)


def render_control_page(lane: Lane, runs: Runs, films: Mapping[str, bytes], data: Runs) -> str:
    """The page as HTML. runs: method -> its result.json; films: method -> WebP; data: data sets' summaries by folder."""
    sections = [found for found in (learning_section(lane, runs), data_section(data), exact_section(lane, runs)) if found]
    glyphs: dict[str, str] = {}
    for section in sections:
        for block in section.blocks:
            if isinstance(block, Figures):
                for drawing in block.drawings:
                    glyphs.update(drawing.svg.glyphs)
    shown = [
        {
            "caption": f"{title_of(lane, name)}, {runs[name]['task']}"
            + (f", from {lane.methods[name].settings['dataset']}" if runs[name]["problem"] == "offline" else ""),
            "source": f"data:image/webp;base64,{base64.b64encode(film).decode()}",
        }
        for name, film in films.items()
    ]
    return template("control.html.j2").render(
        light=css_variables(0),
        dark=css_variables(1),
        glyphs=[glyphs[name] for name in sorted(glyphs)],
        sections=sections,
        films=shown,
        methods=len(runs),
        seeds=lane.seeds,
    )
