"""An experiment, and sessions that run it with a runner that trains nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from stages.claims.experiment import FOLDER, Experiment, load_experiment
from stages.claims.plan import Outcome
from stages.claims.results import result_path
from stages.claims.runner import ExperimentRunner
from stages.claims.session import Session
from stages.runtime.workspace import RunFailedError

SPEC: dict[str, Any] = {
    **{"family": "credit", "method": "RLOO", "paper": "p", "switch": "s", "environment": "search"},
    "looks": [4, 6, 8],
    "budget": {"environment_steps": 1000},
    "untuned": "arms share everything",
    "ungated": "a test",
    "arms": {"rloo": {"rl": {"algorithm": "rloo"}}, "grpo": {"rl": {"algorithm": "grpo"}}},
    "claims": [{"says": "RLOO is better.", "arm": "rloo", "against": "grpo", "threshold": 0.02}],
}
TUNE = {"untuned": None, "tune": {"key": "rl.learning_rate", "values": [0.001, 0.01, 0.1]}}
GATE = {"ungated": None, "gate": {"baseline": "grpo"}}
PARAMS: dict[str, Any] = {
    **{"seed": 3, "domains": ["search"], "resources": {"device": "cpu", "threads": 2}, "curate": {}, "evaluate": {}},
    **{"rl": {"learning_rate": 0.01}, "per_domain": {"search": {}}},
}


class FakeRunner(ExperimentRunner):
    """Runs no stages. `success` depends on (algorithm, seed, learning rate); curves rise from the start to it."""

    code = "f" * 16
    start_of = 0.4
    validation_tasks = 96

    def __init__(self, root: Path, program: str = "rl") -> None:
        super().__init__(root, "c" * 40, program=program)
        self.played: list[str] = []
        self.failing, self.released = "", 0

    def success(self, algorithm: str, seed: int, rate: float) -> float:
        base, factor = {"rloo": (0.8, 7), "grpo": (0.6, 3)}.get(algorithm, (0.7, 1))
        return base + 0.01 * (seed * factor % 5)

    def start_success(self, values: Mapping[str, Any]) -> float:
        return self.start_of

    def release(self, name: str) -> None:
        self.released += 1

    def train_and_evaluate(self, name, values, metrics, trains=True, required=None) -> Outcome:  # type: ignore[no-untyped-def]
        rl, split = values["rl"], values["evaluate"].get("split", "test")
        algorithm = rl["algorithm"] if trains else "sft"
        self.played.append(f"{algorithm}/{rl['seed']}" + (f" {rl['learning_rate']} {split}" if split != "test" else ""))
        if self.failing == self.played[-1]:
            raise RunFailedError("no room left")
        success = self.success(algorithm, rl["seed"], rl["learning_rate"])
        shares = [self.start_of + (success - self.start_of) * step / 9 for step in range(10)] if trains else []
        shares = np.float32(shares).tolist()  # as the file keeps them
        line = {"environment_steps": 0, "reward_mean": 0.0, "entropy": 0.0}
        curve = [{"step": step, "success": share, **line} for step, share in enumerate(shares)]
        found = {metric: success if metric.startswith("panel.") else None for metric in metrics}
        rows = [{}] * self.validation_tasks if split == "valid" else []
        return Outcome(found, 9, 60.0, self.commit, self.code, rows, curve)


def experiment(root: Path, slug: str = "rloo", **changes: Any) -> Experiment:
    values = {key: one for key, one in {**SPEC, **changes}.items() if one is not None}
    path = root / FOLDER / f"{slug}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return load_experiment(path)


def run(root: Path, one: Experiment, runner: FakeRunner | None = None, slug: str = "rloo") -> tuple[FakeRunner, int]:
    runner = runner or FakeRunner(root)
    return runner, Session(root, slug, one, PARAMS, runner, jobs=2).run()


def saved(root: Path, slug: str = "rloo") -> dict[str, Any]:
    return json.loads(result_path(root, slug).read_text())
