"""`python -m stages.reporting.comparison FILE.json [SETTING/SEED=ROWS ...]`: the verdicts, table and figure of a comparison of
settings over seeds.

FILE.json, written by flows/compare.py, holds the comparison (`settings`, `seeds`, `looks`, `metric`, `claim`, `margin`,
`threshold`), its `domains`, and `scores` (setting -> [runs, domains]). ROWS is data/evaluation/rows.parquet of a run; with those
of all runs, intervals are over seeds and clusters of tasks, else over seeds alone. FILE.md and FILE.svg are written beside it,
and `verdicts` into it: for every setting but the first its looks, effect and verdict by the rules of the claims board.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.claims.inference import Sample
from stages.claims.judging import look_entry
from stages.claims.sequential import Kind, judge
from stages.evaluation.aggregates import Bounded, iqm, probability_of_improvement, stratified_bootstrap
from stages.evaluation.statistics import StatisticsError
from stages.records.episode import read_json, read_rows, write_json
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
class Rule:
    """What decides a setting against the first; see stages.claims.sequential.Rule."""

    kind: Kind
    threshold: float
    margin: float


def task_table(comparison: Mapping[str, Any], setting: str, files: Sequence[Path]) -> tuple[list[str], np.ndarray] | None:
    """(each task's cluster [T], the metric's mean over each task's attempts [runs, T]); None if the runs played different tasks,
    as where `seed` varies and a domain without a file in data/raw draws its panel by it."""
    model, metric = comparison["settings"][setting]["model"], comparison["metric"]
    runs = []
    for file in files:
        values: dict[tuple[str, str, str], list[float]] = {}
        for row in read_rows(file, ["model", "domain", "cluster", "task_id", metric]):
            if row["model"] == (f"rl@{row['domain']}" if model == "specialist" else model):
                values.setdefault((row["domain"], row["cluster"], row["task_id"]), []).append(float(row[metric]))
        runs.append({key: sum(of) / len(of) for key, of in sorted(values.items())})
    if any(run.keys() != runs[0].keys() for run in runs):
        return None
    return [f"{domain} {cluster}" for domain, cluster, _ in runs[0]], np.array([list(run.values()) for run in runs])


def samples_of(
    comparison: Mapping[str, Any], rows: Mapping[str, Sequence[Path]], pair: tuple[str, str], count: int
) -> tuple[Sample, Sample]:
    """The first `count` runs of both settings: by clusters of tasks if there are rows and all these runs played the same tasks,
    else their means over the domains."""
    complete = all(len(rows.get(one, ())) >= count for one in pair)
    tables = [task_table(comparison, one, rows[one][:count]) for one in pair] if complete else []
    found = [table for table in tables if table is not None]
    if len(found) == len(pair) and found[0][0] == found[1][0]:
        a, b = (Sample.of_tasks(values, clusters) for clusters, values in found)
    else:
        a, b = (Sample(np.asarray(comparison["scores"][one][:count], dtype=np.float64).mean(axis=1)) for one in pair)
    return a, b


def verdicts_of(comparison: Mapping[str, Any], rows: Mapping[str, Sequence[Path]]) -> dict[str, dict[str, Any]]:
    """Setting -> its looks against the first setting, and the last one's effect and verdict (undecided before the first look).
    rows: setting -> evaluation rows of its runs, seed by seed. Raises StatisticsError."""
    first, *others = comparison["scores"]
    looks = comparison["looks"] or [len(comparison["seeds"])]
    rule = Rule(comparison["claim"] or "superiority", comparison["threshold"], comparison["margin"])
    found = {}
    for name in others:
        count = min(len(comparison["scores"][one]) for one in (name, first))
        taken = [look_entry(look) for look in judge(looks, *samples_of(comparison, rows, (name, first), count), rule)]
        last = taken[-1] if taken else {"effect": "undecided", "verdict": "undecided"}
        found[name] = {"looks": taken, "effect": last["effect"], "verdict": last["verdict"]}
    return found


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


def _against_first(comparison: Mapping[str, Any], name: str, share: bool) -> list[str]:
    """Difference from the first setting with its interval, and the effect."""
    found = comparison["verdicts"].get(name)
    if found is None or not found["looks"]:
        return ["–", "–" if found is None else found["effect"]]
    last = found["looks"][-1]
    return [_bounded(Bounded(last["difference"], last["low"], last["high"]), share), f"**{found['effect']}**"]


def rules_text(comparison: Mapping[str, Any]) -> str:
    """How the effects were found, and the verdict on the claim, if there is one."""
    scale, unit = (100, " points") if comparison["metric"] in SHARES else (1, "")
    looks = comparison["looks"] or [len(comparison["seeds"])]
    taken = [look for one in comparison["verdicts"].values() for look in one["looks"]]
    over = "seeds and clusters of tasks" if taken and all(look["clusters"] for look in taken) else "seeds alone"
    text = (
        f"Effects against `{next(iter(comparison['scores']))}` by the rules of the claims board: intervals over {over}, looks "
        f"after {', '.join(map(str, looks))} seeds that err by 5 % in all, equivalent within "
        f"{scale * comparison['margin']:g}{unit}."
    )
    if comparison["claim"]:
        kind = comparison["claim"].replace("_", "-")
        states = "; ".join(f"`{name}`: **{one['verdict']}**" for name, one in comparison["verdicts"].items())
        text += f" Claim of {kind}: {states}."
    return text


def table(comparison: Mapping[str, Any], lines: list[Line]) -> str:
    """Markdown: interquartile mean, probability of improvement over the first setting, mean per domain, overrides."""
    share = comparison["metric"] in SHARES
    unit, domains = ", %" if share else "", comparison["domains"]
    header = [
        "setting",
        f"IQM{unit} (95 %)",
        f"P(better than {lines[0].name})",
        f"minus {lines[0].name}{unit}",
        "effect",
        *(f"{domain}{unit}" for domain in domains),
        "changes",
    ]
    body = []
    for line in lines:
        means = [f"{100 * mean:.1f}" if share else f"{mean:.3f}" for mean in line.scores.mean(axis=0)]
        better = "–" if line.improvement is None else _bounded(line.improvement, share=False)
        body.append(
            [
                *(f"`{line.name}`", _bounded(line.iqm, share), better, *_against_first(comparison, line.name, share)),
                *(*means, ", ".join(f"`{one}`" for one in line.overrides) or "–"),
            ]
        )
    rows = markdown_table(header, body, "lrrrl" + "r" * (len(header) - 6) + "l")
    about = (
        f"{comparison['metric']} over {len(comparison['seeds'])} seeds (`{comparison['vary']}`) and {len(domains)} domain"
        f"{'s' if len(domains) > 1 else ''}: interquartile mean (IQM) with stratified bootstrap, and the probability that a run "
        f"outperforms one of `{lines[0].name}` (arXiv 2108.13264)."
    )
    return f"{rows}\n\n{about} {rules_text(comparison)}\n"


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


def write(path: Path, rows: Mapping[str, Sequence[Path]]) -> None:
    """Verdicts in FILE.json, and FILE.md and FILE.svg beside it. rows: see `verdicts_of`; without any, stored verdicts stay."""
    comparison = read_json(path)
    if rows or "verdicts" not in comparison:
        comparison["verdicts"] = verdicts_of(comparison, rows)
        write_json(path, comparison)
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
    parser.add_argument("rows", nargs="*", metavar="SETTING/SEED=ROWS", help="evaluation rows of the runs, in the order of seeds")
    options = parser.parse_args()
    file, rows = options.file, {}
    try:
        for given in options.rows:
            run, _, path = given.partition("=")
            rows.setdefault(run.rpartition("/")[0], []).append(Path(path))
        write(file, rows)
    except (FileNotFoundError, KeyError, StatisticsError) as error:
        print(f"comparison: {file}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
