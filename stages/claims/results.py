"""reports/claims/<slug>.json: the metrics of an experiment's runs so far, and the verdicts on its claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.claims.design_metrics import METRICS as DESIGN_METRICS
from stages.claims.experiment import FOLDER, Claim, Experiment, digest, run_values
from stages.claims.label_metrics import METRICS, WORLDS
from stages.control.settings import OfflineQ
from stages.designs.settings import parse_search
from stages.evaluation.aggregates import claim_verdict, paired_difference
from stages.params import parse_params
from stages.records.episode import read_json, write_json

CONFIDENCE = 0.95
ALWAYS = ("panel.success", "panel.turns", "panel.cost", "panel.tokens")
"""Metrics of every run, also those that no claim needs, by lane."""
ALWAYS_LABELS = tuple(f"labels.{world}.{metric}" for world in WORLDS for metric in METRICS)
ALWAYS_DESIGNS = tuple(f"designs.{metric}" for metric in DESIGN_METRICS)
ALWAYS_OFFLINE = ("offline.win_rate", "offline.value_rmse", "offline.overestimation")
DIGITS = 6


def result_path(root: Path, slug: str) -> Path:
    return root / FOLDER / f"{slug}.json"


@dataclass(frozen=True)
class Run:
    """One arm with one seed; `key` is a hash of its parameters and metrics."""

    arm: str
    seed: int
    values: Mapping[str, Any]
    key: str

    @property
    def name(self) -> str:
        return f"{self.arm}/{self.seed}"


def metrics_of(experiment: Experiment) -> list[str]:
    by_lane = {"labels": ALWAYS_LABELS, "designs": ALWAYS_DESIGNS, "offline_q": ALWAYS_OFFLINE}
    always = by_lane.get(experiment.lane, ALWAYS)
    return sorted({*always, *experiment.measured, *(claim.metric for claim in experiment.claims)})


def required_of(experiment: Experiment, arm: str) -> list[str]:
    """The metrics that runs of the arm must have: ALWAYS, and those of its claims."""
    claimed = {claim.metric for claim in experiment.claims if arm in (claim.arm, claim.against)}
    return [metric for metric in metrics_of(experiment) if metric in ALWAYS or metric in claimed]


def _shaping(experiment: Experiment, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that shape a run and differ from their defaults: so a new setting does not invalidate finished runs."""
    if experiment.lane == "offline_q":
        return OfflineQ.model_validate(values).model_dump(mode="json", exclude_defaults=True)
    parse = parse_search if experiment.lane == "designs" else parse_params
    shaping = parse(values, "params.yaml").model_dump(mode="json", exclude_defaults=True)
    # Of the resources, those that change results.
    chosen = ("device", "precision", "tokens_per_batch")
    shaping["resources"] = {name: one for name, one in shaping.get("resources", {}).items() if name in chosen}
    for name in ("report", "merge"):
        shaping.pop(name, None)
    return shaping


def planned_runs(experiment: Experiment, params: Mapping[str, Any]) -> list[Run]:
    """All runs, seed by seed, so that those of an interrupted experiment are paired."""
    runs = []
    for seed in experiment.seeds:
        for arm in experiment.arms:
            values = run_values(experiment, arm, seed, params)
            runs.append(Run(arm, seed, values, digest([_shaping(experiment, values), metrics_of(experiment)])))
    return runs


@dataclass
class Results:
    """Outcomes by run name, each with its run's key."""

    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    """Arm -> panel success of its initial policy."""

    @classmethod
    def load(cls, path: Path) -> Results:
        """The stored results; empty if there are none."""
        if not path.exists():
            return cls()
        saved = read_json(path)
        return cls(saved["runs"], saved["start"])

    def missing(self, runs: list[Run]) -> list[Run]:
        """Runs that are not done, or were done with other parameters."""
        return [run for run in runs if self.outcomes.get(run.name, {}).get("key") != run.key]

    def drop_others(self, runs: list[Run]) -> None:
        """Drop the outcomes of other runs."""
        keys = {run.name: run.key for run in runs}
        self.outcomes = {name: one for name, one in self.outcomes.items() if keys.get(name) == one["key"]}

    def reuse(self, others: Iterable[Results], runs: list[Run]) -> int:
        """Copy missing outcomes from other experiments with equal parameters, seed and metrics; how many."""
        known = {one["key"]: (results, name, one) for results in others for name, one in results.outcomes.items()}
        reused = [run for run in self.missing(runs) if run.key in known]
        for run in reused:
            results, name, self.outcomes[run.name] = known[run.key]
            arm = name.rpartition("/")[0]
            if arm in results.starts:
                self.starts[run.arm] = results.starts[arm]
        return len(reused)

    def report(self, experiment: Experiment) -> dict[str, Any]:
        """The content of the file: claims with their verdicts (null while runs are missing), arms, runs, cost, commits."""
        done = list(self.outcomes.values())
        return {
            "method": experiment.method,
            "environment": experiment.environment,
            "fixed": experiment.fixed,
            "arms": experiment.arms,
            "shared": experiment.shared,
            "seeds": experiment.seeds,
            "budget": experiment.budget.model_dump() if experiment.budget else None,
            "confidence": CONFIDENCE,
            "claims": [self.judge(experiment, claim) for claim in experiment.claims],
            "start": dict(sorted(self.starts.items())),
            "runs": dict(sorted(self.outcomes.items())),
            "planned": len(experiment.arms) * len(experiment.seeds),
            "cost": {
                "environment_steps": sum(one["environment_steps"] for one in done),
                "seconds": round(sum(one["seconds"] for one in done), 1),
            },
            "commits": sorted({one["commit"] for one in done}),
        }

    def judge(self, experiment: Experiment, claim: Claim) -> dict[str, Any]:
        """A claim with its metric per seed, the paired difference with its confidence interval, and the verdict."""
        judged: dict[str, Any] = claim.model_dump(exclude={"checked"})
        per_seed = {
            arm: [self.outcomes.get(f"{arm}/{seed}", {}).get("metrics", {}).get(claim.metric) for seed in experiment.seeds]
            for arm in (claim.arm, claim.against)
        }
        judged["per_seed"] = per_seed
        pairs = list(zip(per_seed[claim.arm], per_seed[claim.against], strict=True))
        if any(None in pair for pair in pairs):
            return {**judged, "difference": None, "low": None, "high": None, "verdict": None}
        found = paired_difference([a for a, _ in pairs], [b for _, b in pairs], CONFIDENCE)
        return {
            **judged,
            "difference": round(found.difference, DIGITS),
            "low": round(found.low, DIGITS),
            "high": round(found.high, DIGITS),
            "verdict": claim_verdict(found, claim.threshold),
        }

    def write(self, path: Path, experiment: Experiment) -> dict[str, Any]:
        report = self.report(experiment)
        write_json(path, report)
        return report
