"""Runs all scenarios, each in its own process, and writes the results."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.measure import Options
from benchmarks.startup import SkippedError, environment

SCENARIOS = {
    "stage_help": "startup:stage_help",
    "noop_repro": "startup:noop_repro",
    "noop_lifecycle": "startup:noop_lifecycle",
    "tracking": "tracking:measure",
    "engine_limit": "engine_limit:measure",
    "generate_ragged": "generate_ragged:measure",
    "rollout_multi_turn": "rollout_multi_turn:measure",
    "train_step": "train_step:measure",
    "mcts": "mcts:measure",
    "annotation": "mcts:annotation",
    "rl_iteration": "rl_iteration:measure",
    "merge": "merge:measure",
    "sandbox": "sandbox:measure",
    "profiles": "profiles:measure",
    "scaling_rollouts": "scaling:rollouts",
    "scaling_steps": "scaling:steps",
    "scaling_merges": "scaling:merges",
    "lifecycle": "lifecycle:recorded",
}
"""Scenario -> module:function that measures it."""
PACKAGES = ("torch", "transformers", "trl", "mergekit", "accelerate", "numpy", "safetensors", "tokenizers", "dvc")
SUMMARY = ("ratio", "ours", "theirs", "unit", "against")


def measure(name: str, options: Options) -> dict[str, Any]:
    """Measure one scenario: {"results": {name: raw}}, {"table": rows} or {"lifecycle": what the stages recorded}."""
    module, function = SCENARIOS[name].split(":")
    call = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    if module == "lifecycle":
        return {"lifecycle": call(options.root)}
    found = call(options)
    if isinstance(found, list):
        return {"table": found}
    return {"results": {key: result.raw() for key, result in found.items()}}


def child(name: str, options: Options, out: Path) -> int:
    """Entry point of a scenario's process: measure, and write the outcome to `out`."""
    from stages.runtime.workers import quiet_environment

    quiet_environment(options.threads)
    try:
        outcome = measure(name, options)
    except SkippedError as reason:
        outcome = {"skipped": str(reason)}
    out.write_text(json.dumps(outcome), encoding="utf-8")
    return 0


def measure_in_process(name: str, options: Options) -> dict[str, Any]:
    """Run the scenario in its own process with a temporary scratch folder. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.scratch) as folder:
        out = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "benchmarks", "--scenario", name, "--outcome", str(out), "--scratch", folder]
        command += ["--repeats", str(options.repeats), *(["--quick"] if options.quick else [])]
        own = {**environment(options.root), "BELLWETHER_TRACKING": "off", "TRL_EXPERIMENTAL_SILENCE": "1"}
        own["PYTHONWARNINGS"] = "ignore"
        code = subprocess.run(command, cwd=options.root, env=own, check=False).returncode
        if code or not out.exists():
            raise RuntimeError(f"{name} failed (exit code {code}); see its output above")
        outcome: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return outcome


def machine(options: Options) -> dict[str, Any]:
    """Commit, hardware and package versions."""
    from stages.tracking import git_state

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    commit, dirty = git_state(options.root)
    return {
        "commit": commit + ("+" if dirty else ""),
        "cpu": cpu_name(),
        "nproc": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": options.threads,
        "blas": blas(),
        "precision": options.precision,
        "versions": versions,
    }


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def blas() -> str:
    """Torch's BLAS library and CPU instruction set."""
    import torch

    settings = torch.__config__.show()
    return ", ".join(re.findall(r"BLAS_INFO=(\w+)", settings) + re.findall(r"CPU capability usage: (\w+)", settings))


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)


def add(raw: dict[str, Any], name: str, outcome: dict[str, Any], commit: str, seconds: float) -> None:
    """Add a scenario's outcome to the contents of raw.json."""
    for key, result in outcome.get("results", {}).items():
        raw["scenarios"][key] = {**result, "commit": commit}
    if "table" in outcome:
        raw["tables"][name] = {"commit": commit, "rows": outcome["table"]}
    if "lifecycle" in outcome:
        raw["lifecycle"] = outcome["lifecycle"]
    raw["skipped"].pop(name, None)
    if "skipped" in outcome:
        raw["skipped"][name] = outcome["skipped"]
    raw["scenario_seconds"][name] = round(seconds, 1)


def write(raw: dict[str, Any], out: Path) -> None:
    """Write raw.json and summary.json."""
    write_json(out / "raw.json", raw)
    write_json(out / "summary.json", {key: {name: value[name] for name in SUMMARY} for key, value in raw["scenarios"].items()})


def run(names: list[str], options: Options, out: Path) -> list[str]:
    """Measure the scenarios and write the files after each; others keep earlier results. Returns the failures."""
    from benchmarks import scaling

    path = out / "raw.json"
    raw = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for key in ("scenarios", "tables", "skipped", "scenario_seconds"):
        raw.setdefault(key, {})
    raw |= {"machine": machine(options), "spread": "low and high: smallest and largest ratio of the pairs"}
    raw |= {"repeats": options.times, "warm_ups": options.warm_ups}
    failures = []
    measured: set[str] = set()
    for name in names:
        print(f"benchmarks: {name}", flush=True)
        started = time.perf_counter()
        try:
            outcome = measure_in_process(name, options)
        except RuntimeError as error:
            failures.append(str(error))
            print(f"benchmarks: {error}", file=sys.stderr, flush=True)
            continue
        add(raw, name, outcome, raw["machine"]["commit"], time.perf_counter() - started)
        measured |= set(outcome.get("results", {}))
        for key, result in outcome.get("results", {}).items():
            ratio = result["ratio"]
            print(f"  {key}: {ratio['median']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g})", flush=True)
        for row in outcome.get("table", []):
            print("  " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if "skipped" in outcome:
            print(f"  skipped: {outcome['skipped']}", flush=True)
        write(raw, out)
        if "table" in outcome:
            scaling.write(out / f"{name}.csv", outcome["table"])
    if not failures and set(names) == set(SCENARIOS):
        # Drop results of scenarios that no longer exist.
        raw["scenarios"] = {key: value for key, value in raw["scenarios"].items() if key in measured}
        write(raw, out)
    return failures
