"""An experiment that compares RLOO with GRPO, its file, outcomes of its runs, and an experiment of lane annotate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from stages.claims.experiment import FOLDER, Experiment, load_experiment
from stages.claims.plan import Outcome, metrics_of
from stages.claims.results import Results

SPEC: dict[str, Any] = {
    "method": "RLOO",
    "paper": "arXiv 2402.14740",
    "switch": "rl.algorithm: rloo",
    "family": "policy_optimisation",
    "environment": "search",
    "budget": {"environment_steps": 1000},
    "untuned": "arms share everything",
    "ungated": "a test",
    "shared": {"rl": {"tasks_per_step": 4, "group_size": 8}},
    "arms": {"rloo": {"rl": {"algorithm": "rloo"}}, "grpo": {"rl": {"algorithm": "grpo"}}},
    "claims": [{"says": "RLOO is better than GRPO.", "arm": "rloo", "against": "grpo", "threshold": 0.02}],
}
PARAMS: dict[str, Any] = {
    "seed": 3,
    "domains": ["textworld", "search"],
    "resources": {"device": "cpu", "threads": 2},
    "rl": {"learning_rate": 0.001},
    "merge": {"weights": {"textworld": 2.0}},
    "per_domain": {"textworld": {}, "search": {"rl": {"steps": 50, "group_size": 2}, "environment": {"echo_query": True}}},
}


def experiment(**changes: Any) -> Experiment:
    return Experiment.model_validate({**SPEC, **changes})


def write(root: Path, slug: str = "rloo", **changes: Any) -> Experiment:
    path = root / FOLDER / f"{slug}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**SPEC, **changes}, sort_keys=False), encoding="utf-8")
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")  # no code bears on the runs
    return load_experiment(path)


def outcome(success: float, **metrics: float | None) -> Outcome:
    found = {**dict.fromkeys(metrics_of(experiment()), success), **metrics}
    return Outcome(found, 1010, 2.0, "c" * 40, "0" * 16)


def fill(results: Results, runs: list, rloo: list[float], grpo: list[float]) -> None:
    for run in runs:
        values = {"rloo": rloo, "grpo": grpo}[run.arm]
        if run.seed < len(values):
            results.add(run, outcome(values[run.seed]))


CHOICE: dict[str, Any] = {
    **{name: SPEC[name] for name in ("method", "paper", "switch", "environment", "family")},
    "lane": "annotate",
    "start": "own",
    "shared": {"annotate": {"tasks": 48, "q_model": {"kind": "step_dpo"}}},
    "arms": {"plain": {}, "q": {"evaluate": {"models": ["sft+q"]}}},
    "claims": [{"says": "x", "arm": "q", "against": "plain"}],
}
