"""Runs all scenarios, each in its own process, and writes the results."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.measure import Options
from benchmarks.startup import SkippedError, environment
from stages.runtime.cores import available_cores, processor
from stages.runtime.lineage import dvc_hash, file_hash


@dataclass(frozen=True)
class Scenario:
    """`function`: module:function that measures it; `repeats`: at most so many; `kept`: whether a result stays valid until code,
    settings or machine change."""

    function: str
    repeats: int = 5
    kept: bool = True


SCENARIOS = {
    "stage_help": Scenario("startup:stage_help"),
    "noop_repro": Scenario("startup:noop_repro"),
    "noop_lifecycle": Scenario("startup:noop_lifecycle", repeats=3),
    "tracking": Scenario("tracking:measure", repeats=3),
    "engine_limit": Scenario("engine_limit:measure", repeats=3),
    "generate_ragged": Scenario("generate_ragged:measure", repeats=2),
    "rollout_multi_turn": Scenario("rollout_multi_turn:measure", repeats=2),
    "train_step": Scenario("train_step:measure", repeats=3),
    "gemma": Scenario("gemma:measure", repeats=2),
    "mcts": Scenario("mcts:measure"),
    "annotation": Scenario("mcts:annotation", repeats=1),
    "rl_iteration": Scenario("rl_iteration:measure"),
    "off_policy": Scenario("off_policy:measure", repeats=3),
    "control": Scenario("control:measure", repeats=3),
    "merge": Scenario("merge:measure", repeats=2),
    "sandbox": Scenario("sandbox:measure"),
    "workers": Scenario("workers:measure", repeats=2),
    "side_by_side": Scenario("side_by_side:measure", repeats=2),
    "nodes": Scenario("nodes:measure", repeats=1),
    "profiles": Scenario("profiles:measure"),
    "scaling_rollouts": Scenario("scaling:rollouts", repeats=3),
    "scaling_steps": Scenario("scaling:steps", repeats=3),
    "scaling_merges": Scenario("scaling:merges", repeats=2),
    "default_run": Scenario("default_run:measure", kept=False),
    "claims": Scenario("default_run:claims", kept=False),
    "lifecycle": Scenario("lifecycle:recorded", kept=False),
}
PACKAGES = ("torch", "transformers", "trl", "mergekit", "accelerate", "numpy", "safetensors", "tokenizers", "dvc")
SUMMARY = ("ratio", "ours", "theirs", "unit", "against", "cores", "device")


def measure(name: str, options: Options) -> dict[str, Any]:
    """Measure one scenario: {"results": {name: raw}} and {"table": rows}, as far as it has them, or {"lifecycle": what the stages
    recorded}."""
    module, function = SCENARIOS[name].function.split(":")
    call = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    if module == "lifecycle":
        return {"lifecycle": call(options.root)}
    found = call(options)
    results, table = found if isinstance(found, tuple) else ({}, found) if isinstance(found, list) else (found, None)
    outcome: dict[str, Any] = {"results": {key: result.raw() for key, result in results.items()}}
    return outcome if table is None else {**outcome, "table": table}


def modules(name: str) -> set[Path]:
    """Files of benchmarks/ that module `name` uses: those that it imports or starts, directly or not."""
    folder = Path(__file__).parent
    found, waiting = set(), {name}
    while waiting:
        path = folder / f"{waiting.pop()}.py"
        found.add(path)
        text = path.read_text(encoding="utf-8")
        named = {other for other in folder.glob("*.py") if re.search(rf"benchmarks(\.| import .*\b){other.stem}\b", text)}
        waiting |= {other.stem for other in named - found}
    return found


def key(name: str, options: Options, machine: Mapping[str, Any]) -> str:
    """Hash of all that a result depends on; "" if it is measured anew each time."""
    if not SCENARIOS[name].kept:
        return ""
    files = [*modules(SCENARIOS[name].function.partition(":")[0]), *(options.root / "params.yaml", options.root / "dvc.lock")]
    hashes = {path.name: file_hash(path) for path in files if path.exists()}
    folders = {folder: dvc_hash(options.root / folder) for folder in ("stages", "flows")}
    settings = (SCENARIOS[name].repeats, options.repeats, options.quick, options.threads, options.workers)
    facts = {**machine, "commit": None}
    text = json.dumps([hashes, folders, settings, facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def child(name: str, options: Options, out: Path) -> int:
    """Entry point of a scenario's process: measure, and write the outcome to `out`."""
    from stages.runtime.workers import quiet_environment

    quiet_environment(options.threads)
    few = replace(options, repeats=min(options.repeats, SCENARIOS[name].repeats))
    try:
        outcome = measure(name, few)
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


MISSING = "not installed"


def known_versions(now: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Versions of packages, those of an earlier run for what is not installed now: its scenarios' results stay."""
    return {name: before.get(name, found) if found == MISSING else found for name, found in now.items()}


def machine(options: Options) -> dict[str, Any]:
    """Commit, hardware and package versions."""
    from stages.tracking import git_state

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = MISSING
    commit, dirty = git_state(options.root)
    return {
        "commit": commit + ("+" if dirty else ""),
        "cpu": processor() or platform.processor(),
        "nproc": available_cores(),
        "threads": options.threads,
        "workers": options.workers,
        "cores": options.cores,
        "blas": blas(),
        "precision": options.precision,
        "versions": versions,
    }


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


def add(raw: dict[str, Any], name: str, outcome: dict[str, Any], seconds: float, identity: str) -> None:
    """Replace a scenario's results in the contents of raw.json by `outcome`."""
    commit, cores, device = (raw["machine"][fact] for fact in ("commit", "cores", "cpu"))
    raw["scenarios"] = {key: value for key, value in raw["scenarios"].items() if value.get("scenario") != name}
    for key, result in outcome.get("results", {}).items():
        raw["scenarios"][key] = {"cores": cores, "device": device, **result, "commit": commit, "scenario": name}
    if "table" in outcome:
        raw["tables"][name] = {"commit": commit, "rows": outcome["table"]}
    if "lifecycle" in outcome:
        raw["lifecycle"] = outcome["lifecycle"]
    raw["skipped"].pop(name, None)
    raw["keys"][name] = identity
    if "skipped" in outcome:
        raw["skipped"][name] = outcome["skipped"]
        del raw["keys"][name]
    raw["scenario_seconds"][name] = round(seconds, 1)


def write(raw: dict[str, Any], out: Path) -> None:
    """Write raw.json and summary.json."""
    write_json(out / "raw.json", raw)
    write_json(out / "summary.json", {key: {name: value[name] for name in SUMMARY} for key, value in raw["scenarios"].items()})


def read(out: Path) -> dict[str, Any]:
    """The contents of raw.json, without results of scenarios that no longer exist."""
    path = out / "raw.json"
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in ("tables", "skipped", "keys", "scenario_seconds"):
        raw[part] = {name: value for name, value in raw.get(part, {}).items() if name in SCENARIOS}
    results = raw.get("scenarios", {})
    raw["scenarios"] = {name: value for name, value in results.items() if value.get("scenario") in SCENARIOS}
    return raw


def show(outcome: Mapping[str, Any]) -> None:
    for name, result in outcome.get("results", {}).items():
        ratio = result["ratio"]
        print(f"  {name}: {ratio['median']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g})", flush=True)
    for row in outcome.get("table", []):
        print("  " + ", ".join(f"{column} {value}" for column, value in row.items()), flush=True)
    if "skipped" in outcome:
        print(f"  skipped: {outcome['skipped']}", flush=True)


def run(names: list[str], options: Options, out: Path, fresh: bool = False) -> list[str]:
    """Measure the scenarios and write the files after each. Results with the same key stay, unless `fresh`, so that an
    interrupted run resumes. Returns the failures."""
    from benchmarks import scaling

    raw, here = read(out), machine(options)
    here["versions"] = known_versions(here["versions"], raw.get("machine", {}).get("versions", {}))
    raw |= {"machine": here, "spread": "low and high: smallest and largest ratio of the pairs"}
    raw |= {"repeats": options.times, "warm_ups": options.warm_ups}
    failures = []
    for name in names:
        identity = key(name, options, raw["machine"])
        if not fresh and identity and raw["keys"].get(name) == identity:
            print(f"benchmarks: {name} is measured ({raw['scenario_seconds'][name]:.0f} s)", flush=True)
            continue
        print(f"benchmarks: {name}", flush=True)
        started = time.perf_counter()
        try:
            outcome = measure_in_process(name, options)
        except RuntimeError as error:
            failures.append(str(error))
            print(f"benchmarks: {error}", file=sys.stderr, flush=True)
            continue
        add(raw, name, outcome, time.perf_counter() - started, identity)
        show(outcome)
        write(raw, out)
        if "table" in outcome:
            scaling.write(out / f"{name}.csv", outcome["table"])
    write(raw, out)
    print(f"benchmarks: all scenarios take {sum(raw['scenario_seconds'].values()) / 60:.0f} minutes", flush=True)
    return failures
