"""The board: one row per claim, from the experiments and their results in reports/claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.agent.episode import read_json
from stages.claims.experiment import FOLDER, Claim, Experiment, load_experiment, slugs
from stages.claims.results import result_path
from stages.validation import ParamsError

PAGE = FOLDER / "README.md"
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
            return "–"
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
    """The verdict; for a claim that was not reproduced, with what was checked."""
    state = f"**{row.state}**" if row.result is not None and row.result["verdict"] else row.state
    return f"{state}; checked: {row.claim.checked}" if row.state == "not reproduced" else state


def readme_table(root: Path) -> str:
    """README's block: method, paper, switch, claim, verdict, difference with its interval; the first three once an experiment."""
    lines, told = [], set()
    for row in rows(root):
        one = row.experiment
        whose = (f"[{one.method}]({PAGE}#{row.slug})", one.paper, f"`{one.switch}`") if row.slug not in told else ("", "", "")
        told.add(row.slug)
        lines.append((*whose, row.claim.says, verdict_cell(row), row.difference))
    return _table(("method", "paper", "switch", "claim", "verdict", "difference (95 % interval)"), lines)


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
    return ", ".join("–" if value is None else f"{100 * value:.1f}" if row.in_points else f"{value:.3g}" for value in values)


def _start_cell(saved: Mapping[str, Any] | None, arm: str) -> str:
    return f"{100 * saved['start'][arm]:.1f} %" if saved is not None and arm in saved["start"] else "–"


def _measured(experiment: Experiment, saved: Mapping[str, Any]) -> str:
    """The mean over seeds of what `measured` names, arm by arm; a dash where runs are missing or do not have it."""

    def mean(arm: str, metric: str) -> str:
        runs = [saved["runs"].get(f"{arm}/{seed}") for seed in experiment.seeds]
        values = [run["metrics"][metric] for run in runs if run is not None and run["metrics"][metric] is not None]
        if len(values) < len(runs):
            return "–"
        average = sum(values) / len(values)
        return f"{100 * average:.1f} %" if is_share(metric) else f"{average:.3g}"

    lines = ((f"`{arm}`", *(mean(arm, metric) for metric in experiment.measured)) for arm in experiment.arms)
    return "Means over seeds:\n\n" + _table(("arm", *(f"`{metric}`" for metric in experiment.measured)), lines)


def _section(slug: str, of_slug: list[Row], saved: Mapping[str, Any] | None) -> str:
    """One experiment: what was run, and each claim with its metric per seed."""
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
    told = (
        f"Environment `{experiment.environment}`, {len(experiment.seeds)} paired seeds, {steps}. "
        f"Shared by all arms: {', '.join(_override(experiment.shared)) or f'nothing beyond {of}'}."
    )
    parts = [f'<a id="{slug}"></a>', f"## {experiment.method}", f"{experiment.paper}; `{experiment.switch}`.", told, arms]
    for row in of_slug:
        lines = [f"**{row.claim.says}** {verdict_cell(row)}."]
        if row.result is not None:
            lines.append(
                f"`{row.claim.metric}`, `{row.claim.arm}` against `{row.claim.against}`, "
                f"threshold {row.number(row.claim.threshold)}: {row.difference}. "
                f"Per seed: {_seed_cells(row, row.claim.arm)} against {_seed_cells(row, row.claim.against)}."
            )
        parts.append("\n\n".join(lines))
    if saved is not None and experiment.measured:
        parts.append(_measured(experiment, saved))
    if saved is not None:
        cost = saved["cost"]
        commits = ", ".join(f"`{commit[:12]}`" for commit in saved["commits"])
        parts.append(
            f"Cost: {cost['environment_steps']:,} environment steps, {cost['seconds'] / 60:.0f} minutes of runs; "
            f"commit {commits}."
        )
    return "\n\n".join(parts)


def page(root: Path) -> str:
    """reports/claims/README.md: every experiment with its arms, numbers per seed and cost."""
    by_slug: dict[str, list[Row]] = {}
    for row in rows(root):
        by_slug.setdefault(row.slug, []).append(row)
    parts = [
        "# Which published claims hold here",
        "Written from the files of this folder by `python -m stages.reporting.readme`. Each experiment (`<slug>.yaml`) was fixed "
        "before it was run: arms as overrides of params.yaml, paired seeds, an equal budget of environment steps, metric and "
        "threshold. `make claims` runs what is missing. A claim is *reproduced* if the 95 % interval of the paired difference "
        "over seeds (Student's t) is above zero and the difference at least the threshold (for a negative threshold: if the "
        "interval is above it), *not reproduced* if all of the interval is below the threshold, and else *undecided*.",
    ]
    for slug, of_slug in by_slug.items():
        path = result_path(root, slug)
        saved = read_json(path) if path.exists() and of_slug[0].state != OUTDATED else None
        parts.append(_section(slug, of_slug, saved))
    return "\n\n".join(parts) + "\n"
