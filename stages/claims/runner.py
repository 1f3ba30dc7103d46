"""Runs the arms of experiments, each in a workspace made from the committed checkout, and reads their metrics.

All runs that agree in everything before rl start from one workspace, which `dvc repro` brings up to date with the checkout's DVC
cache: the SFT policy is trained once for all arms and seeds. An interrupted run resumes from its checkpoint; the workspaces of
finished runs are removed.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.claims.experiment import digest, start_values
from stages.records.episode import read_json
from stages.runtime.workspace import EvaluationWorkspace, RunFailedError

FOLDER = Path(".bellwether/claims")
SOURCES = ("data/base", "data/packages", "data/raw", "stages", "dvc.yaml", "params.yaml")
"""Paths of the commit that a workspace holds."""
START = "start.json"
"""In the workspace that runs start from: the evaluation of its SFT policy."""
DVC = "from stages.runtime.parent import die_with_parent; die_with_parent(); from dvc.cli import main; raise SystemExit(main())"
"""DVC as a program that ends with its parent, so that a killed `make claims` leaves no process that writes into a workspace."""
STAGES = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
"""
"""Stages one after another in one process, which imports torch and transformers once."""
MODULES = {
    "labels": "stages.claims.mcts_labels",
    "designs": "stages.claims.design_search",
    "offline_q": "stages.control.offline_q",
}
"""Lanes whose runs are one command: `python -m MODULE --settings FILE --result FILE`."""


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, errors="replace", check=True)
    return done.stdout.strip()


def clean_commit(root: Path) -> str:
    """The commit that is checked out. Raises RunFailedError if SOURCES differ from it, since results name a commit."""
    changed = git(root, "status", "--porcelain", "--", *SOURCES)
    if changed:
        raise RunFailedError(f"results name the commit they were measured at; commit these changes first:\n{changed}")
    return git(root, "rev-parse", "HEAD")


def _nested(values: Any, key: str) -> float:
    for part in key.split("."):
        values = values[part]
    return float(values)


def _from_panel(folder: Path, domain: str, key: str) -> float:
    (domains,) = read_json(folder / "reports" / "evaluation.json")["models"].values()
    metrics = domains[domain]
    if key.startswith("difficulty."):
        return float(metrics["by_difficulty"][key.removeprefix("difficulty.")]["success"])
    if key.startswith(("pass_at_k.", "distinct_at_k.")):
        return _nested(metrics, key)
    return float(metrics[key]["mean"])


def _from_history(folder: Path, domain: str, key: str) -> float:
    column, _, part = key.rpartition(".")
    with (folder / "reports" / "rl" / f"{domain}_history.csv").open(encoding="utf-8") as handle:
        values = [float(row[column]) for row in csv.DictReader(handle) if row[column]]
    window = max(1, len(values) // 5)
    chosen = {"mean": values, "first": values[:window], "last": values[-window:]}[part]
    return sum(chosen) / len(chosen)


def read_metric(name: str, folder: Path, domain: str) -> float:
    """The metric `name` (see `Claim.metric`) of the run in `folder`. Raises RunFailedError if the run lacks it."""
    kind, _, key = name.partition(".")
    try:
        if kind == "panel":
            return _from_panel(folder, domain, key)
        if kind == "history":
            return _from_history(folder, domain, key)
        return _nested(read_json(folder / "reports" / {"report": "rl"}.get(kind, kind) / f"{domain}.json"), key)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RunFailedError(f"the run in {folder} has no metric '{name}' (not found: {error!r})") from error


@dataclass
class ExperimentRunner:
    """Runs of one commit of the checkout `root`. Outcomes hold metrics, environment steps, seconds and the commit."""

    root: Path
    commit: str
    threads: int = 1
    workers: int = 1
    """Processes that share the making of a start, for which runs wait; a run is one process."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def folder(self) -> Path:
        return self.root / FOLDER / self.commit[:12]

    def _check_out(self, workspace: EvaluationWorkspace) -> None:
        workspace.check_out(self.root, self.commit, SOURCES)

    def start(self, values: Mapping[str, Any]) -> EvaluationWorkspace:
        """The workspace in which everything before rl is done, made once for all runs that share it."""
        domain = values["domains"][0]
        values = {**values, "resources": {**values["resources"], "workers": self.workers}}

        def prepare(workspace: EvaluationWorkspace) -> None:
            self._check_out(workspace)
            workspace.write_settings(values)
            workspace.python(["-c", DVC, "--wait-for-lock", "repro", f"annotate@{domain}"], self.threads)
            shutil.rmtree(workspace.folder / ".dvc")
            workspace.write_settings({**values, "evaluate": {**values["evaluate"], "models": ["sft"]}})
            workspace.python(["-m", "stages.evaluate"], self.threads)
            (workspace.folder / "reports" / "evaluation.json").rename(workspace.folder / START)

        workspace = EvaluationWorkspace(self.folder / f"start-{domain}-{digest(start_values(values))}")
        with self._lock:
            workspace.create(prepare)
        return workspace

    def start_success(self, values: Mapping[str, Any]) -> float:
        """Success of the SFT policy on the panel that the runs play."""
        models = read_json(self.start(values).folder / START)["models"]
        return float(models["sft"][values["domains"][0]]["success"]["mean"])

    def _outcome(self, metrics: Mapping[str, float | None], environment_steps: int, began: float) -> dict[str, Any]:
        seconds = round(time.monotonic() - began, 1)
        return {
            "metrics": {name: metrics[name] for name in sorted(metrics)},
            "environment_steps": environment_steps,
            "seconds": seconds,
            "commit": self.commit,
        }

    def _shared_workspace(self, lane: str, common: Mapping[str, Any]) -> EvaluationWorkspace:
        """The workspace that all runs of a lane of MODULES share."""
        if lane == "offline_q":
            workspace = EvaluationWorkspace(self.folder / "offline")
            with self._lock:
                workspace.create(self._check_out)
            return workspace
        workspace = self.start(common)
        if lane == "designs":  # on all cores, before the first search reads it
            with self._lock:
                workspace.write_settings(common, "table.yaml")
                workers = os.cpu_count() or 1 if common["resources"]["device"] == "cpu" else 1
                command = ["-m", MODULES[lane], "--table", "--settings", "table.yaml", "--workers", str(workers)]
                workspace.python(command, 1)
        return workspace

    def measure(
        self, lane: str, name: str, values: Mapping[str, Any], common: Mapping[str, Any], metrics: Sequence[str]
    ) -> dict[str, Any]:
        """One run of a lane of MODULES; `common`: params.yaml of what its runs share. Raises RunFailedError."""
        workspace = self._shared_workspace(lane, common)
        began = time.monotonic()
        settings, result = f"{name}.yaml", f"{name}.result.json"
        workspace.write_settings(values, settings)
        files = ["--settings", settings, "--result", result, "--threads", str(self.threads)]
        workspace.python(["-m", MODULES[lane], *files], self.threads)
        found = read_json(workspace.folder / result)
        steps = found.pop("environment_steps")
        missing = sorted(set(metrics) - set(found))
        if missing:
            raise RunFailedError(f"{name} has no metric '{missing[0]}'; it has {', '.join(found)}")
        return self._outcome({metric: found[metric] for metric in metrics}, steps, began)

    def train_and_evaluate(
        self,
        name: str,
        values: Mapping[str, Any],
        metrics: Sequence[str],
        trains: bool = True,
        required: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """One run of lane rl, or (not `trains`) of lane annotate, which plays the SFT policy. Resumes an interrupted run of this
        name; seconds are then those since. Metrics that are not `required` (None: all are) are None where the run lacks them.
        Raises RunFailedError."""
        domain, workspace = values["domains"][0], EvaluationWorkspace(self.folder / name)
        start = self.start(values)
        workspace.create(lambda new: new.copy_of(start))
        workspace.write_settings(values)
        began = time.monotonic()
        report = workspace.folder / "reports" / ("rl" if trains else "annotate") / f"{domain}.json"
        training = [] if report.exists() else [["stages.rl", "--domain", domain]]
        workspace.python(["-c", STAGES, json.dumps([*training, ["stages.evaluate"]])], self.threads)
        found: dict[str, float | None] = {}
        for metric in metrics:
            try:
                found[metric] = read_metric(metric, workspace.folder, domain)
            except RunFailedError:
                if required is None or metric in required:
                    raise
                found[metric] = None
        outcome = self._outcome(found, read_json(report)["environment_steps"], began)
        workspace.remove()
        return outcome
