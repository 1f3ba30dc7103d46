"""reports/claims/<slug>.md: one experiment's claims, curves, gate, tuning and settings, and its numbers per seed, folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.claims.experiment import FOLDER, Claim, Experiment, is_share
from stages.claims.plan import LEARNT
from stages.claims.results import NOT_RUN
from stages.claims.tuning import FIRST_SEED
from stages.control.problems import PROBLEMS
from stages.reporting.blocks import percent
from stages.reporting.board import cells
from stages.reporting.board.conditions import conditions
from stages.reporting.board.rows import NOTHING, Entry, Row
from stages.reporting.generated_blocks import markdown_table
from stages.tracking import flatten

LANES = {
    "rl": "no environment steps: all arms learn from the same offline episodes",
    "annotate": "no RL: each seed has its own SFT policy and trees, and the SFT policy plays the panel",
    "designs": "no training: searches are replayed on a table of every design's score, and intervals are over searches",
    "merge": "the same specialists for all arms of a seed, trained from one SFT policy",
    "labels": "no training: labels and pairs of search trees are compared with exact values",
}
"""What a run is, for experiments without a budget of environment steps."""

GALLERY = "A gallery: it shows how training goes, one run beside the other, and judges nothing."

Saved = Mapping[str, Any]
Value = Callable[[str, str], float | None]
"""(run's name, metric) -> its value, or None (`Results.value`)."""


def page_of(slug: str) -> Path:
    """The page of an experiment, relative to the checkout."""
    return FOLDER / f"{slug}.md"


def _rule(row: Row) -> str:
    """What decides the claim: `at least +2.0, margin 5.0`."""
    claim = row.claim
    margin = f"margin {row.signed(claim.margin).removeprefix('+')}"
    if claim.kind != "superiority":
        return f"{claim.kind.replace('_', '-')}, {margin}"
    return f"at least {row.signed(claim.threshold)}, {margin}" if claim.threshold else f"better, {margin}"


def _claims(of_slug: list[Row]) -> str:
    header = ("#", "claim", "verdict", "effect", "difference (interval)", "decided by", "seeds", "p", "corrected p")
    lines = (
        (
            *(str(row.number), cells.says(row), cells.verdict(row), cells.effect(row), cells.difference(row), _rule(row)),
            *(row.seeds, *cells.p_values(row)),
        )
        for row in of_slug
    )
    return markdown_table(header, lines)


def _looks(of_slug: list[Row]) -> str:
    """Every look taken at each claim."""
    lines = [
        (
            *(str(row.number), str(look["seeds"]), f"{100 * look['alpha']:.2g} %", row.estimate(look), cells.p_value(look["p"])),
            *(look["effect"], look["verdict"]),
        )
        for row in of_slug
        if row.result is not None
        for look in row.result["looks"]
    ]
    header = ("claim", "seeds", "level", "difference (interval at that level)", "p", "effect", "verdict")
    return f"Looks:\n\n{markdown_table(header, lines)}" if lines else "No look has been taken."


def _numbered(of_slug: list[Row], key: str) -> Iterable[str]:
    """A list item per text of this key, with the claims that it is about."""
    texts: dict[str, list[str]] = {}
    for row in of_slug:
        if text := getattr(row.claim, key):
            texts.setdefault(" ".join(text.split()).rstrip("."), []).append(str(row.number))
    for text, numbers in texts.items():
        yield f"- Claim{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {text}."


def _explanations(experiment: Experiment, of_slug: list[Row]) -> Iterable[str]:
    if experiment.learnt:
        yield f"## What we learnt, and what would change our mind\n\n{experiment.learnt.strip()}"
    for key, title in (("world", "Could this environment show the effect?"), ("checked", "How the implementation was checked")):
        if items := list(_numbered(of_slug, key)):
            yield f"## {title}\n\n" + "\n".join(items)


def _percents(values: Sequence[float]) -> str:
    return f"{percent(fmean(values))} ({', '.join(f'{100 * one:.1f}' for one in values)})" if values else NOTHING


def _gate(experiment: Experiment, saved: Saved | None, value: Value) -> str:
    gate = experiment.gate
    if gate is None:
        return f"No gate: {experiment.ungated}."
    found = saved["gate"] if saved is not None else None

    def shares(low: float, high: float) -> str:
        return f"{100 * low:g} to {100 * high:g} %"

    early, late, above = "early in training", "late in training", "above early"
    seeds = range(len(found["first"]) if found else 0)
    if any(value(f"{gate.baseline}/{seed}", LEARNT[0]) is None for seed in seeds):  # as `judge_gate` has it
        early, late, above = "before training, as it has no curve", "after training, as it has no curve", "above before"
    figures = [
        ("success of the start on the panel", percent(found["start"]) if found else NOTHING, shares(*gate.start)),
        (f"of `{{}}` {early}", _percents(found["first"]) if found else NOTHING, NOTHING),
        (f"of `{{}}` {late}", _percents(found["last"]) if found else NOTHING, f"{above} (one-sided, 95 %)"),
        ("of `{}` on the panel afterwards", _percents(found["end"]) if found else NOTHING, shares(*gate.end)),
    ]
    for one in gate.require:
        runs = [saved["runs"].get(f"{one.arm}/{seed}") for seed in range(gate.runs)] if saved is not None else []
        values = [run["metrics"].get(one.metric) for run in runs if run is not None]
        known = [value for value in values if value is not None]
        mean = f"{fmean(known):.3g} ({', '.join(f'{value:.3g}' for value in known)})" if known else NOTHING
        figures.append((f"`{one.metric}` of `{one.arm}`", mean, f"{one.range[0]:g} to {one.range[1]:g}"))
    lines = [(what.format(gate.baseline), measured, wanted) for what, measured, wanted in figures]
    state = "Not judged yet." if not found else "**Passed.**" if found["passed"] else f"**Failed**: {found['why']}."
    return f"{state} Seeds 0 to {gate.runs - 1}.\n\n{markdown_table(('figure', 'mean (per seed)', 'required'), lines)}"


def _tuning(experiment: Experiment, saved: Saved | None) -> str:
    tune = experiment.tune
    if tune is None:
        return f"Nothing is tuned: {experiment.untuned}."
    tried, chosen = (saved[name] if saved is not None else {} for name in ("tuning", "chosen"))

    def cell(arm: str, value: float) -> str:
        found = tried.get(arm, {}).get(repr(value))
        if not found:
            return NOTHING
        return f"**{percent(fmean(found))}**" if chosen.get(arm) == value else percent(fmean(found))

    arms = [arm for arm in experiment.arms if experiment.tunes(arm)]
    lines = [(f"`{arm}`", *(cell(arm, value) for value in tune.values)) for arm in arms]
    seeds = f"seed {FIRST_SEED}" if tune.seeds == 1 else f"seeds {FIRST_SEED} to {FIRST_SEED + tune.seeds - 1}"
    table = markdown_table(("arm", *(f"{value:g}" for value in tune.values)), lines)
    return f"Success on validation tasks by `{tune.key}` ({seeds}, which no claim uses); chosen: bold.\n\n{table}"


def _overrides(values: Mapping[str, Any]) -> list[str]:
    """`rl.loss.aggregation: token_mean` for each leaf."""
    return [f"`{key}: {value}`" for key, value in flatten(values).items()]


def _settings(experiment: Experiment, saved: Saved | None) -> Iterable[str]:
    problem = PROBLEMS.get(experiment.program)
    base, steps = (problem.file, problem.random) if problem else ("params.yaml", LANES.get(experiment.lane, ""))
    if experiment.budget:
        steps = f"{experiment.budget.environment_steps:,} environment steps per run"
    looks = ", ".join(map(str, experiment.looks))
    seeds = f"looks at {looks} paired seeds" if experiment.claims else f"seeds per arm: {looks}"
    yield (
        f"Environment `{experiment.environment}`, {seeds}, {steps}. "
        f"Shared by all arms: {', '.join(_overrides(experiment.shared)) or f'the defaults of {base}'}."
    )
    start = saved["start"] if saved is not None else {}
    lines = (
        (f"`{arm}`", ", ".join(_overrides(values)) or "none", percent(start[arm]) if arm in start else NOTHING)
        for arm, values in experiment.arms.items()
    )
    yield markdown_table(("arm", f"overrides of {base}", "success before training"), lines)


def _means(experiment: Experiment, saved: Saved, value: Value) -> str:
    """The mean over seeds of each metric in `measured`, by arm; a dash if runs are missing or lack it."""

    def mean(arm: str, metric: str) -> str:
        found = [value(name, metric) for name in saved["runs"] if name.rpartition("/")[0] == arm]
        known = [one for one in found if one is not None]
        if not known or len(known) < len(found):
            return NOTHING
        return percent(fmean(known)) if is_share(metric) else f"{fmean(known):.3g}"

    lines = ((f"`{arm}`", *(mean(arm, metric) for metric in experiment.measured)) for arm in experiment.arms)
    return "Means over seeds:\n\n" + markdown_table(("arm", *(f"`{metric}`" for metric in experiment.measured)), lines)


def _per_seed(row: Row) -> tuple[str, ...]:
    claim: Claim = row.claim

    def cell(value: float | None) -> str:
        if value is None:
            return NOTHING
        return f"{100 * value:.1f}" if is_share(claim.metric) else f"{value:.3g}"

    per_seed = {} if row.result is None else row.result["per_seed"]
    arms = (f"`{arm}`: {', '.join(map(cell, per_seed.get(arm) or [None]))}" for arm in (claim.arm, claim.against))
    return (str(row.number), f"`{claim.metric}`", *arms)


def experiment_page(entry: Entry, curves: str, code: str | None, value: Value, tradeoff: str = "") -> str:
    """The page. curves: the text about its learning curves, "" in lanes without any; code: hash of the code that a run would have
    now, None if no run has been made; value: of its runs; tradeoff: the text about cost against success, if any."""
    slug, experiment, of_slug, saved = entry.slug, entry.experiment, entry.rows, entry.saved
    chosen = f"PROFILE={experiment.profile} METHOD={slug}" if experiment.profile else f"METHOD={slug}"
    head = f"{experiment.paper}; `{experiment.switch}`. Run it: `make claims {chosen}`. [All experiments](README.md)."
    parts = [f"# {experiment.method}", head]
    if saved is None:
        parts.append(f"This experiment {'is' if entry.state == NOT_RUN else 'has'} {entry.state}.")
    parts += [_claims(of_slug), _looks(of_slug)] if of_slug else [GALLERY]
    parts += _explanations(experiment, of_slug)
    if curves:
        parts.append(f"## Learning curves\n\n{curves}")
    if tradeoff:
        parts.append(f"## Cost against success\n\n{tradeoff}")
    if experiment.lane == "rl" and of_slug:
        parts += [f"## Gate\n\n{_gate(experiment, saved, value)}", f"## Tuning\n\n{_tuning(experiment, saved)}"]
    elif experiment.tune is not None and of_slug:
        parts.append(f"## Tuning\n\n{_tuning(experiment, saved)}")
    about = "What the verdicts are conditional on" if of_slug else "What the runs share"
    parts.append(f"## {about}\n\n{conditions(experiment, saved, code)}")
    parts += ["## Settings", *_settings(experiment, saved)]
    if saved is not None and experiment.measured:
        parts.append(_means(experiment, saved, value))
    if of_slug:
        seeds = markdown_table(("claim", "metric", "arm, per seed", "against, per seed"), map(_per_seed, of_slug))
        parts.append(f"<details><summary>Numbers per seed</summary>\n\n{seeds}\n\n</details>")
    if saved is not None:
        commits = ", ".join(f"`{commit[:12]}`" for commit in saved["commits"])
        parts.append(f"Cost: {cells.experiment_cost(saved)}; commit{'s' * (len(saved['commits']) > 1)} {commits}.")
    return "\n\n".join(parts) + "\n"
