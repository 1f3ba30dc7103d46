"""The page of lane control: learning curves, comparisons, data sets, exact worlds, films. One self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from stages.control.lane.settings import Lane
from stages.control.lane.statistics import improvement, iqm_curve, last_scores
from stages.evaluation.aggregates import Bounded, iqm, stratified_bootstrap
from stages.reporting.blocks import Block, Drawing, Figures, Heading, Section, Table, draw, number, slug
from stages.reporting.control_summary import CURVE, END, IMPROVEMENT
from stages.reporting.figures.control import bound_curves, control_curves
from stages.reporting.style import css_variables
from stages.reporting.template import template

Runs = Mapping[str, Mapping[str, Any]]
OF_PLAYED = {
    "overestimation": "over-estimation",
    "model_error": "model's error",
    "value_error": "value-weighted error",
    "model_distance": "model's distance",
    "bellman_gap": "Bellman gap",
}
"""Figures of played methods beside their returns: those of the critics and of a learnt model."""


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
        "the greedy policy. The end of a run is the mean of its evaluations in the second half; runs of unequal length are "
        "compared after the steps of the shorter one."
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


def baselines(lane: Lane, runs: Runs) -> dict[str, str]:
    """Played methods by what they are compared with: the first of their group, which has no baseline."""
    return {name: names[0] for names in played(lane, runs).values() for name in names[1:]}


def ends(lane: Lane, runs: Runs, names: Sequence[str]) -> Table:
    """How runs end, the probability that one ends higher than one of the group's first method, and OF_PLAYED where a method of
    the group has them."""
    rows, more = [], [name for name in OF_PLAYED if any(name in runs[method]["figures"] for method in names)]
    for name in names:
        scale = lane.scales.get(runs[name]["task"])
        scores = last_scores(runs[name])
        found = stratified_bootstrap(iqm, scores, resamples=1000)
        share = f"{100 * scale.normalised(found.value):.0f} %" if scale else "–"
        better = "–" if name == names[0] else interval(improvement(runs[name], runs[names[0]]), 2)
        digits = 1 if max(abs(found.low), abs(found.high)) >= 10.0 else 2
        figures = [spread(runs[name]["figures"].get(figure, [])) for figure in more]
        rows.append([title_of(lane, name), interval(found, digits), share, better, *figures])
    compared = f"P(better than {title_of(lane, names[0])})"
    header = ("method", "return at the end", "of the scale", compared, *(OF_PLAYED[figure] for figure in more))
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
        if problem == "linear_mdp":
            blocks += bound_figures(lane, runs, names)
    if not blocks:
        return None
    intro = "Problems whose answers are known: what is learnt is compared with them. Mean over seeds, and range."
    return Section("exact", "Exact worlds", intro, blocks)


def bound_figures(lane: Lane, runs: Runs, names: Sequence[str]) -> list[Block]:
    """Suboptimality beside its bound, of methods that differ in the number of episodes alone."""
    alike: dict[str, dict[int, str]] = {}
    for name in names:
        settings = dict(lane.section(name, 0))
        episodes = settings.pop("episodes")
        if "bound" in runs[name]["figures"]:
            alike.setdefault(str(settings), {})[episodes] = name
    drawings: list[Drawing] = []
    for series in alike.values():
        if len(series) > 1:
            of = [runs[series[count]]["figures"] for count in sorted(series)]
            values = ([one["suboptimality"] for one in of], [one["bound"] for one in of])
            caption = "How far the policy's worst case is below the best one's, and R2PVI's bound of that, by seeds."
            drawings.append(draw(f"bound-{len(drawings)}", caption, bound_curves, sorted(series), *values))
    return [Figures(drawings)] if drawings else []


def spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean, low, high = sum(values) / len(values), min(values), max(values)
    return number(mean) if low == high else f"{number(mean)} ({number(low)} to {number(high)})"


def results_table(runs: Runs, against: Mapping[str, str]) -> str:
    """CSV: method, problem, task, figure, mean over seeds, lowest, highest; to six digits. A learning curve's figures are
    `return at 500`, after 500 steps, and `end of runs`, an interquartile mean; `improvement over sac` is the probability that a
    run ends higher than one of that method after as many steps (`against`: method -> the one it is compared with). Of these
    two, lowest and highest are the ends of the 95 % interval."""
    rows = [("method", "problem", "task", "figure", "mean", "lowest", "highest")]
    for name, run in runs.items():
        curve = zip(run["steps"], zip(*run["returns"], strict=True), strict=False)
        of_seeds = [*run["figures"].items(), *((f"{CURVE}{step}", values) for step, values in curve)]
        found = {figure: (sum(values) / len(values), min(values), max(values)) for figure, values in of_seeds}
        if run["returns"] and run["returns"][0]:
            found[END] = bounds(stratified_bootstrap(iqm, last_scores(run), resamples=1000))
        if name in against:
            found[f"{IMPROVEMENT}{against[name]}"] = bounds(improvement(run, runs[against[name]]))
        for figure, numbers in found.items():
            rows.append((name, run["problem"], run["task"], figure, *(f"{value:.6g}" for value in numbers)))
    return "".join(",".join(row) + "\n" for row in rows)


def bounds(found: Bounded) -> tuple[float, float, float]:
    return found.value, found.low, found.high


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
