"""The board: one row per claim, from the experiments and their results in reports/claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.claims.experiment import FOLDER, Claim, Experiment, is_share, load_experiment, slugs
from stages.claims.results import result_path
from stages.records.episode import read_json
from stages.reporting.generated_blocks import markdown_table
from stages.runtime.validation import ParamsError
from stages.tracking import flatten

PAGE = FOLDER / "README.md"
NOTHING = "–"
NOT_RUN, OUTDATED = "not run yet", "changed since it was run"
LANES = {
    "rl": "no environment steps: all arms learn from the same offline episodes",
    "annotate": "no RL: each seed has its own SFT policy and trees, and the SFT policy plays the panel",
    "designs": "no training: searches are replayed on a table of every design's score, and intervals are over searches",
    "labels": "no training: labels and pairs of search trees are compared with exact values",
    "offline_q": "each run learns from its own dataset of games",
}
"""What a run is, for experiments without a budget of environment steps."""


def page_of(slug: str) -> Path:
    """The page of an experiment, relative to the checkout."""
    return FOLDER / f"{slug}.md"


@dataclass(frozen=True)
class Row:
    """A claim and its entry in the results; `result` is None before the first run."""

    slug: str
    experiment: Experiment
    claim: Claim
    result: Mapping[str, Any] | None
    state: str
    """The verdict, or why there is none."""

    def number(self, value: float) -> str:
        """A signed difference: in points for shares, else in the metric's unit."""
        text = f"{100 * value:+.1f}" if is_share(self.claim.metric) else f"{value:+.3g}"
        return text.replace("-", "−")

    @property
    def difference(self) -> str:
        if self.result is None or self.result["difference"] is None:
            return NOTHING
        low, high = self.number(self.result["low"]), self.number(self.result["high"])
        unit = " points" if is_share(self.claim.metric) else ""
        return f"{self.number(self.result['difference'])}{unit} ({low} to {high})"


def seeds_done(experiment: Experiment, result: Mapping[str, Any]) -> int:
    """Seeds that both arms of a claim have."""
    return min((len(values) for arm, values in result["per_seed"].items() if not experiment.seedless(arm)), default=0)


def rows(root: Path) -> list[Row]:
    """All claims, in order. Raises ParamsError for a claim that was not reproduced and has no key `checked`."""
    found = []
    for slug in slugs(root):
        experiment = load_experiment(root / FOLDER / f"{slug}.yaml")
        path = result_path(root, slug)
        saved = read_json(path) if path.exists() else None
        for number, claim in enumerate(experiment.claims):
            result, state = None, NOT_RUN
            if saved is not None and saved["fixed"] != experiment.fixed:
                state = OUTDATED
            elif saved is not None:
                result = saved["claims"][number]
                state = result["verdict"] or f"{seeds_done(experiment, result)} of {experiment.looks[0]} seeds"
            if state == "not reproduced" and not claim.checked:
                raise ParamsError(
                    f"{FOLDER}/{slug}.yaml: claim {number + 1} was not reproduced; check the implementation against numbers "
                    f"worked out by hand and a brute-force reference, and describe the check in the claim's key 'checked'"
                )
            found.append(Row(slug, experiment, claim, result, state))
    return found


def _claims_table(of_slug: list[Row]) -> str:
    lines = []
    for row in of_slug:
        verdict = f"**{row.state}**" if row.result is not None and row.result["verdict"] else row.state
        least = row.claim.threshold if row.claim.kind == "superiority" else -row.claim.margin
        lines.append((row.claim.says, verdict, row.difference, row.number(least)))
    return markdown_table(("claim", "verdict", "difference (interval)", "threshold"), lines)


def _index_table(by_slug: Mapping[str, list[Row]]) -> str:
    """A row per experiment: method with a link to its page, paper, switch, number of claims per verdict."""
    lines = []
    for slug, of_slug in by_slug.items():
        experiment = of_slug[0].experiment
        counts = ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in of_slug).items())
        title = f"[{experiment.method}]({page_of(slug).name})"
        lines.append((title, experiment.paper, f"`{experiment.switch}`", counts))
    return markdown_table(("experiment", "paper", "switch", "claims"), lines)


def _overrides(values: Mapping[str, Any]) -> list[str]:
    """`rl.loss.aggregation: token_mean` for each leaf."""
    return [f"`{key}: {value}`" for key, value in flatten(values).items()]


def _means_table(experiment: Experiment, saved: Mapping[str, Any]) -> str:
    """The mean over seeds of each metric in `measured`, by arm; a dash if runs are missing or lack it."""

    def mean(arm: str, metric: str) -> str:
        runs = [run for name, run in saved["runs"].items() if name.rpartition("/")[0] == arm]
        values = [run["metrics"][metric] for run in runs if run["metrics"].get(metric) is not None]
        if not values or len(values) < len(runs):
            return NOTHING
        average = sum(values) / len(values)
        return f"{100 * average:.1f} %" if is_share(metric) else f"{average:.3g}"

    lines = ((f"`{arm}`", *(mean(arm, metric) for metric in experiment.measured)) for arm in experiment.arms)
    return "Means over seeds:\n\n" + markdown_table(("arm", *(f"`{metric}`" for metric in experiment.measured)), lines)


def _per_seed(row: Row) -> tuple[str, ...]:
    def cell(value: float | None) -> str:
        if value is None:
            return NOTHING
        return f"{100 * value:.1f}" if is_share(row.claim.metric) else f"{value:.3g}"

    per_seed = {} if row.result is None else row.result["per_seed"]
    arms = (f"`{arm}`: {', '.join(map(cell, per_seed.get(arm, [None])))}" for arm in (row.claim.arm, row.claim.against))
    return (row.claim.says, f"`{row.claim.metric}`", *arms)


def _arms_table(experiment: Experiment, base: str, saved: Mapping[str, Any] | None) -> str:
    start = saved["start"] if saved is not None else {}
    lines = (
        (f"`{arm}`", ", ".join(_overrides(values)) or "none", f"{100 * start[arm]:.1f} %" if arm in start else NOTHING)
        for arm, values in experiment.arms.items()
    )
    return markdown_table(("arm", f"overrides of {base}", "success before training"), lines)


def experiment_page(slug: str, of_slug: list[Row], saved: Mapping[str, Any] | None) -> str:
    """reports/claims/<slug>.md: the claims of one experiment, its settings, and the numbers per seed, folded."""
    experiment = of_slug[0].experiment
    base = "stages/control/settings.py" if experiment.lane == "offline_q" else "params.yaml"
    head = f"{experiment.paper}; `{experiment.switch}`. Run it: `make claims METHOD={slug}`. [All experiments](README.md)."
    parts = [f"# {experiment.method}", head, _claims_table(of_slug)]
    if checked := [f"- {row.claim.says} {row.claim.checked}" for row in of_slug if row.state == "not reproduced"]:
        parts += ["How the implementation was checked where a claim was not reproduced:", "\n".join(checked)]
    steps = f"{experiment.budget.environment_steps:,} environment steps per run" if experiment.budget else LANES[experiment.lane]
    setting = (
        f"Environment `{experiment.environment}`, looks at {', '.join(map(str, experiment.looks))} paired seeds, {steps}. "
        f"Shared by all arms: {', '.join(_overrides(experiment.shared)) or f'the defaults of {base}'}."
    )
    parts += ["## Settings", setting, _arms_table(experiment, base, saved)]
    if saved is not None and experiment.measured:
        parts.append(_means_table(experiment, saved))
    seeds = markdown_table(("claim", "metric", "arm, per seed", "against, per seed"), map(_per_seed, of_slug))
    parts.append(f"<details><summary>Numbers per seed</summary>\n\n{seeds}\n\n</details>")
    if saved is not None:
        cost = saved["cost"]
        commits = ", ".join(f"`{commit[:12]}`" for commit in saved["commits"])
        parts.append(
            f"Cost: {cost['environment_steps']:,} environment steps, {cost['seconds'] / 60:.0f} minutes; commit {commits}."
        )
    return "\n\n".join(parts) + "\n"


INTRODUCTION = (
    "`make claims` runs what is missing; `make claims METHOD=lite_ppo` runs one experiment. Each `<slug>.yaml` was fixed before "
    "its first run: arms as overrides of params.yaml, looks at preset numbers of paired seeds, an equal budget of environment "
    "steps, metric, threshold and margin. Only wording may change later. `python -m stages.reporting.documents` writes these "
    "pages.\n\n"
    "The error probability of 5 % is split over the looks; arms of a comparison that is decided get no further seeds. A claim of "
    "superiority is *reproduced* if the interval of the paired difference lies above zero and the difference is at least the "
    "threshold, and *not reproduced* if the difference is smaller than that, negative, or equivalent to zero within the margin. "
    "A claim of non-inferiority is *reproduced* if the interval lies above the negative margin, and *not reproduced* if it lies "
    "below."
)


def pages(root: Path) -> dict[Path, str]:
    """The index, reports/claims/README.md, and one page per experiment, by path relative to `root`."""
    by_slug: dict[str, list[Row]] = {}
    for row in rows(root):
        by_slug.setdefault(row.slug, []).append(row)
    files = {PAGE: "\n\n".join(["# Which published claims hold here", INTRODUCTION, _index_table(by_slug)]) + "\n"}
    for slug, of_slug in by_slug.items():
        path = result_path(root, slug)
        saved = read_json(path) if path.exists() and of_slug[0].state != OUTDATED else None
        files[page_of(slug)] = experiment_page(slug, of_slug, saved)
    return files
