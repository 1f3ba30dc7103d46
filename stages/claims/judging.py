"""The verdicts on an experiment's claims from its results, and the file that holds them."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from stages.claims.experiment import Claim, Experiment
from stages.claims.gates import DIGITS, judge_gate
from stages.claims.inference import Sample
from stages.claims.results import Results, cost_in_seconds, result_path
from stages.claims.rows import of_tasks
from stages.claims.sequential import Look, judge, sequential_p
from stages.claims.tuning import are_tuned, chosen_values, tried_values
from stages.records.episode import write_json

CONFIDENCE = 0.95
GATE_FAILED = "gate failed"


def counted_runs(experiment: Experiment, results: Results, claim: Claim, arm: str) -> list[str]:
    """The arm's runs that count for the claim, by seed, up to the first that lacks its metric; one run of an arm without
    seeds."""
    seeds = range(1) if experiment.seedless(arm) else range(claim.fresh_from, claim.fresh_from + experiment.looks[-1])
    runs = (f"{arm}/{seed}" for seed in seeds)
    return list(takewhile(lambda run: results.value(run, claim.metric) is not None, runs))


def samples(experiment: Experiment, results: Results, claim: Claim, seeds: int = 0) -> tuple[Sample, Sample] | None:
    """Both arms' samples over the seeds that both have, or the first `seeds` of them; None without any. Over clusters of tasks,
    too, if the metric is a mean over tasks and all these runs played the same ones."""
    arms = (claim.arm, claim.against)
    seedless = [experiment.seedless(arm) for arm in arms]
    runs = [counted_runs(experiment, results, claim, arm) for arm in arms]
    ready = min((len(of) for of, without in zip(runs, seedless, strict=True) if not without), default=1)
    ready = min(ready, seeds) if seeds else ready
    runs = [of if without else of[:ready] for of, without in zip(runs, seedless, strict=True)]
    if not all(runs):
        return None
    tasks = [[of_tasks(claim.metric, results.tables.rows.get(run, [])) for run in of] for of in runs]
    played = {tuple((row["task_id"], row["cluster"]) for row, _ in of_run) for of in tasks for of_run in of}
    if len(played) == 1 and (panel := played.pop()):
        clusters = [cluster for _, cluster in panel]
        values = [np.array([[value for _, value in of_run] for of_run in of]) for of in tasks]
        a, b = (Sample.of_tasks(of, clusters, without) for of, without in zip(values, seedless, strict=True))
    else:
        single = [np.array([results.value(run, claim.metric) for run in of]) for of in runs]
        a, b = (Sample(of, seedless=without) for of, without in zip(single, seedless, strict=True))
    return a, b


def looks_of(experiment: Experiment, results: Results, claim: Claim) -> list[Look]:
    """The looks taken at a claim; none before its arms' settings are tuned."""
    if not are_tuned(experiment, results, (claim.arm, claim.against)):
        return []

    def at(seeds: int) -> tuple[Sample, Sample]:
        found = samples(experiment, results, claim, seeds)
        assert found is not None
        return found

    # Each look is over its own runs, so that a later one without rows per task leaves it as it was.
    found = samples(experiment, results, claim)
    return judge(experiment.looks, *found, claim, at) if found else []


def is_open(experiment: Experiment, looks: list[Look]) -> bool:
    """Whether further seeds may decide a claim."""
    return not looks or (looks[-1].verdict == "undecided" and 0 < looks[-1].seeds < experiment.looks[-1])


def look_entry(look: Look) -> dict[str, Any]:
    """A look as the file has it."""
    numbers = {name: round(getattr(look.estimate, name), DIGITS) for name in ("difference", "low", "high", "p")}
    return {
        **{"seeds": look.seeds, "clusters": look.estimate.clusters, "alpha": round(look.alpha, DIGITS)},
        **{**numbers, "effect": look.effect, "verdict": look.verdict},
    }


def claim_entry(experiment: Experiment, results: Results, claim: Claim, gated: bool) -> dict[str, Any]:
    """A claim as the file has it: its metric per seed, its looks, and the last one's difference, interval and verdict (null
    before the first look). `gated`: the gate is passed, or has not failed."""
    runs = {arm: counted_runs(experiment, results, claim, arm) for arm in (claim.arm, claim.against)}
    looks = looks_of(experiment, results, claim) if gated else []
    entries = [look_entry(look) for look in looks]
    last: dict[str, Any] = dict.fromkeys(("difference", "low", "high", "p", "effect", "verdict", "seeds"))
    if looks:
        p = sequential_p([look.estimate.p for look in looks], [look.alpha for look in looks])
        last = {name: entries[-1][name] for name in last} | {"p": round(p, DIGITS)}
        if claim.exploratory and not claim.fresh_from and last["verdict"] == "reproduced":
            last["verdict"] = "undecided"  # until fresh seeds confirm it
    elif not gated:
        last["verdict"] = GATE_FAILED
    return {
        **claim.model_dump(exclude={"checked", "world"}),
        "per_seed": {arm: [results.value(run, claim.metric) for run in of] for arm, of in runs.items()},
        "looks": entries,
        **last,
    }


def report(experiment: Experiment, results: Results) -> dict[str, Any]:
    """The content of the file: claims with their looks and verdicts, gate, tuning, arms, runs, cost, commits."""
    gate = judge_gate(experiment, results)
    gated = gate is None or gate["passed"]
    done = [*results.outcomes.values(), *results.trials.values()]
    return {
        "family": experiment.family,
        "method": experiment.method,
        "environment": experiment.environment,
        "fixed": experiment.fixed,
        "arms": experiment.arms,
        "shared": experiment.shared,
        "looks": experiment.looks,
        "budget": experiment.budget.model_dump() if experiment.budget else None,
        "confidence": CONFIDENCE,
        "claims": [claim_entry(experiment, results, claim, gated) for claim in experiment.claims],
        "gate": gate,
        "tuning": tried_values(experiment, results),
        "chosen": chosen_values(experiment, results),
        "start": dict(sorted(results.starts.items())),
        **({"start_keys": dict(sorted(results.start_keys.items()))} if results.start_keys else {}),
        "runs": dict(sorted(results.outcomes.items())),
        "trials": dict(sorted(results.trials.items())),
        **({"confirmed": results.confirmed} if results.confirmed else {}),
        "cost": {
            "environment_steps": sum(one["environment_steps"] for one in done),
            "seconds": round(sum(map(cost_in_seconds, done)), 1),
        },
        "commits": sorted({one["commit"] for one in done}),
    }


def write(root: Path, slug: str, experiment: Experiment, results: Results) -> dict[str, Any]:
    """Write the tables, and then the file, which says what there is of them; its content."""
    results.tables.write(root, slug)
    content = report(experiment, results)
    write_json(result_path(root, slug), content)
    return content
