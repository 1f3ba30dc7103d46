"""The board: one row per claim, from the experiments and their results in reports/claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.claims.experiment import FOLDER, Claim, Experiment, load_experiment, slugs
from stages.claims.results import result_path
from stages.records.episode import read_json
from stages.runtime.validation import ParamsError

PAGE = FOLDER / "README.md"
NOTHING = "–"
NOT_RUN, OUTDATED = "not run yet", "changed since it was run"
SHARES = frozenset({"success", "difficulty", "pass_at_k", "solutions_differ", "win_rate", "area", "best", "found", "regret"})
"""Second parts of metrics that are shares, to be shown in per cent."""
LANES = {
    "rl": "nothing is played: all learn from the same stored episodes",
    "annotate": "nothing is trained after annotate, and each seed has an SFT policy and trees of its own",
    "designs": "nothing is trained: searches are replayed on one table of what every design scores, and intervals are over them",
    "labels": "nothing is trained: trees are grown, and their labels and pairs judged by exact values",
    "offline_q": "each run learns from stored games of its own",
}
"""What a run is, where it is not so many steps of an environment."""


def page_of(slug: str) -> Path:
    """The page of an experiment, relative to the checkout."""
    return FOLDER / f"{slug}.md"


def is_share(metric: str) -> bool:
    return metric.split(".")[1] in SHARES


@dataclass(frozen=True)
class Row:
    """A claim and what came of it; `result` is its entry in the results, None before the first run has ended."""

    slug: str
    experiment: Experiment
    claim: Claim
    result: Mapping[str, Any] | None
    state: str
    """The verdict, or why there is none."""

    @property
    def in_points(self) -> bool:
        """Whether the metric is a share, to be shown in per cent."""
        return is_share(self.claim.metric)

    def number(self, value: float) -> str:
        """A difference with its sign: in points for shares, else in the metric's unit."""
        text = f"{100 * value:+.1f}" if self.in_points else f"{value:+.3g}"
        return text.replace("-", "−")

    @property
    def difference(self) -> str:
        if self.result is None or self.result["difference"] is None:
            return NOTHING
        low, high = self.number(self.result["low"]), self.number(self.result["high"])
        unit = " points" if self.in_points else ""
        return f"{self.number(self.result['difference'])}{unit} ({low} to {high})"


def rows(root: Path) -> list[Row]:
    """All claims, in order. Raises ParamsError for a claim that was not reproduced and does not say what was checked."""
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
                state = result["verdict"] or f"running: {len(saved['runs'])} of {saved['planned']} runs"
            if state == "not reproduced" and not claim.checked:
                raise ParamsError(
                    f"{FOLDER}/{slug}.yaml: claim {number + 1} was not reproduced; check the implementation against numbers "
                    f"worked out by hand and a brute-force reference, and say so in the claim's key 'checked'"
                )
            found.append(Row(slug, experiment, claim, result, state))
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    header = list(header)
    body = ["| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *body])


def verdict_cell(row: Row) -> str:
    return f"**{row.state}**" if row.result is not None and row.result["verdict"] else row.state


def claims_table(of_slug: Iterable[Row]) -> str:
    """A row per claim of one experiment: claim, verdict, difference, threshold."""
    lines = ((row.claim.says, verdict_cell(row), row.difference, row.number(row.claim.threshold)) for row in of_slug)
    return _table(("claim", "verdict", "difference (95 % CI)", "threshold"), lines)


def index_table(by_slug: Mapping[str, list[Row]]) -> str:
    """A row per experiment: method with a link to its page, paper, switch, and how many of its claims have which verdict."""
    lines = []
    for slug, of_slug in by_slug.items():
        one = of_slug[0].experiment
        counts = Counter(row.state for row in of_slug)
        told = ", ".join(f"{count} {state}" for state, count in counts.items())
        lines.append((f"[{one.method}]({page_of(slug).name})", one.paper, f"`{one.switch}`", told))
    return _table(("experiment", "paper", "switch", "claims"), lines)


def _override(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`rl.loss.aggregation: token_mean` for each leaf."""
    found = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found += _override(value, f"{prefix}{key}.")
        else:
            found.append(f"`{prefix}{key}: {value}`")
    return found


def _seed_cells(row: Row, arm: str) -> str:
    assert row.result is not None
    values = row.result["per_seed"][arm]
    return ", ".join(NOTHING if value is None else f"{100 * value:.1f}" if row.in_points else f"{value:.3g}" for value in values)


def _start_cell(saved: Mapping[str, Any] | None, arm: str) -> str:
    return f"{100 * saved['start'][arm]:.1f} %" if saved is not None and arm in saved["start"] else NOTHING


def _measured(experiment: Experiment, saved: Mapping[str, Any]) -> str:
    """The mean over seeds of what `measured` names, arm by arm; a dash where runs are missing or do not have it."""

    def mean(arm: str, metric: str) -> str:
        runs = [saved["runs"].get(f"{arm}/{seed}") for seed in experiment.seeds]
        values = [run["metrics"][metric] for run in runs if run is not None and run["metrics"][metric] is not None]
        if len(values) < len(runs):
            return NOTHING
        average = sum(values) / len(values)
        return f"{100 * average:.1f} %" if is_share(metric) else f"{average:.3g}"

    lines = ((f"`{arm}`", *(mean(arm, metric) for metric in experiment.measured)) for arm in experiment.arms)
    return "Means over seeds:\n\n" + _table(("arm", *(f"`{metric}`" for metric in experiment.measured)), lines)


def _details(summary: str, content: str) -> str:
    """`content` folded away behind `summary`."""
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"


def _per_seed(row: Row) -> tuple[str, ...]:
    claim = row.claim
    if row.result is None:
        return (claim.says, f"`{claim.metric}`", f"`{claim.arm}`: {NOTHING}", f"`{claim.against}`: {NOTHING}")
    arms = (f"`{arm}`: {_seed_cells(row, arm)}" for arm in (claim.arm, claim.against))
    return (claim.says, f"`{claim.metric}`", *arms)


def experiment_page(slug: str, of_slug: list[Row], saved: Mapping[str, Any] | None) -> str:
    """reports/claims/<slug>.md: the claims of one experiment, what was run, and the numbers per seed, folded away."""
    experiment = of_slug[0].experiment
    of = "the settings of stages/control/settings.py" if experiment.lane == "offline_q" else "params.yaml"
    arms = _table(
        ("arm", f"overrides of {of}", "start: success on the panel"),
        (
            (f"`{arm}`", ", ".join(_override(values)) or "none", _start_cell(saved, arm))
            for arm, values in experiment.arms.items()
        ),
    )
    steps = f"{experiment.budget.environment_steps:,} environment steps per run" if experiment.budget else LANES[experiment.lane]
    setting = (
        f"Environment `{experiment.environment}`, {len(experiment.seeds)} paired seeds, {steps}. "
        f"Shared by all arms: {', '.join(_override(experiment.shared)) or f'nothing beyond {of}'}."
    )
    head = f"{experiment.paper}; `{experiment.switch}`. Run it: `make claims METHOD={slug}`. [All experiments](README.md)."
    parts = [f"# {experiment.method}", head, claims_table(of_slug)]
    checked = [f"- {row.claim.says} {row.claim.checked}" for row in of_slug if row.state == "not reproduced"]
    if checked:
        parts += ["Checked, where a claim was not reproduced:", "\n".join(checked)]
    parts += ["## What was run", setting, arms]
    if saved is not None and experiment.measured:
        parts.append(_measured(experiment, saved))
    seeds = _table(("claim", "metric", "arm, per seed", "against, per seed"), (_per_seed(row) for row in of_slug))
    parts.append(_details("Numbers per seed", seeds))
    if saved is not None:
        cost = saved["cost"]
        commits = ", ".join(f"`{commit[:12]}`" for commit in saved["commits"])
        parts.append(
            f"Cost: {cost['environment_steps']:,} environment steps, {cost['seconds'] / 60:.0f} minutes of runs; "
            f"commit {commits}."
        )
    return "\n\n".join(parts) + "\n"


INTRODUCTION = (
    "`make claims` runs what is missing; `make claims METHOD=lite_ppo` runs one experiment. Each `<slug>.yaml` was fixed before "
    "its first run: arms as overrides of params.yaml, paired seeds, an equal budget of environment steps, metric and threshold. "
    "`python -m stages.reporting.documents` writes these pages.\n\n"
    "A claim is *reproduced* if the 95 % confidence interval of the paired difference over seeds (Student's t) lies above zero "
    "and the difference is at least the threshold (for a negative threshold: if the interval lies above it), *not reproduced* if "
    "the whole interval lies below the threshold, and *undecided* otherwise."
)


def pages(root: Path) -> dict[Path, str]:
    """The index, reports/claims/README.md, and one page per experiment, by path relative to `root`."""
    by_slug: dict[str, list[Row]] = {}
    for row in rows(root):
        by_slug.setdefault(row.slug, []).append(row)
    files = {PAGE: "\n\n".join(["# Which published claims hold here", INTRODUCTION, index_table(by_slug)]) + "\n"}
    for slug, of_slug in by_slug.items():
        path = result_path(root, slug)
        saved = read_json(path) if path.exists() and of_slug[0].state != OUTDATED else None
        files[page_of(slug)] = experiment_page(slug, of_slug, saved)
    return files
