"""The pipeline as dvc.yaml describes it, and one DVC command per stage. Independent of Prefect and of the stages' work."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

from flows.process import (
    BAD_PARAMETERS,
    ROOT,
    ChildProcesses,
    Echo,
    StageFailedError,
    capture,
    python_environment,
    quoted,
    run_supervised,
)

PACKAGES = Path("data/packages/dvc.yaml")
TICK_S = 2.0
_ITEM = re.compile(r"\$\{item\.[^}]+\}")
_STATES = {
    "ran": re.compile(r"^Running stage '([^']+)'"),
    "restored": re.compile(r"^Stage '([^']+)' is cached"),
    "unchanged": re.compile(r"^Stage '([^']+)' didn't change"),
}
_EXIT_CODE = re.compile(r"^ERROR: failed to reproduce '[^']+': failed to run: .*, exited with (-?\d+)$")


@dataclass(frozen=True)
class StageResult:
    """What DVC did for one stage of dvc.yaml: which items (`rl@search`) ran, were restored from its cache, were up to date."""

    ran: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [("ran", self.ran), ("restored from cache", self.restored), ("up to date", self.unchanged)]
        return "; ".join(f"{state}: {', '.join(names)}" for state, names in parts if names) or "nothing to do"

    @property
    def state(self) -> str:
        """The name of the Prefect task's state: that of the items with most work."""
        return "Ran" if self.ran else "Restored" if self.restored else "UpToDate"

    @classmethod
    def joined(cls, parts: Iterable[StageResult]) -> StageResult:
        parts = list(parts)
        return cls(*(tuple(name for part in parts for name in getattr(part, key)) for key in _STATES))


def _paths(entry: Mapping[str, Any], kinds: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for kind in kinds:
        for item in entry.get(kind, []):
            found.extend([item] if isinstance(item, str) else item)
    return found


def _overlap(dependency: str, output: str) -> bool:
    """Whether one path equals or contains the other; `${item.domain}` matches any name."""
    a, b = _ITEM.sub("*", dependency).split("/"), _ITEM.sub("*", output).split("/")
    return all("*" in (x, y) or x == y for x, y in zip(a, b, strict=False))


def _stages(root: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


def stage_graph(root: Path = ROOT) -> dict[str, list[str]]:
    """Stage -> the stages it depends on, in an order in which they can run. A matrix stage is one entry.

    Raises FileNotFoundError without dvc.yaml, graphlib.CycleError for circular dependencies.
    """
    stages = _stages(root)
    outputs = {name: _paths(entry, ("outs", "metrics", "plots")) for name, entry in stages.items()}
    dependencies = {
        name: [
            other
            for other in stages
            if other != name and any(_overlap(dep, out) for dep in _paths(entry, ("deps",)) for out in outputs[other])
        ]
        for name, entry in stages.items()
    }
    return {name: dependencies[name] for name in TopologicalSorter(dependencies).static_order()}


def sources(root: Path = ROOT) -> list[str]:
    """Patterns of the paths that stages depend on and no stage makes, reports aside: code and raw data."""
    stages = _stages(root)
    outputs = [out for entry in stages.values() for out in _paths(entry, ("outs", "metrics", "plots"))]
    dependencies = {dep for entry in stages.values() for dep in _paths(entry, ("deps",))}
    given = [dep for dep in dependencies if not dep.startswith("reports/") and not any(_overlap(dep, out) for out in outputs)]
    return sorted(_ITEM.sub("*", dep) for dep in given)


def stage_items(root: Path = ROOT) -> dict[str, list[str]]:
    """Stage -> its items: itself, or one name per cell of its matrix (`rl@textworld`). Raises StageFailedError."""
    listed = capture([sys.executable, "-m", "dvc", "stage", "list", "--name-only"], root)
    if listed.returncode:
        raise StageFailedError(f"dvc stage list failed in {root}: {listed.stderr.strip()}", BAD_PARAMETERS)
    items: dict[str, list[str]] = {name: [] for name in _stages(root)}
    for item in listed.stdout.split():
        items[item.split("@")[0]].append(item)
    return items


def gpu_stages(root: Path = ROOT) -> frozenset[str]:
    """The stages that use the GPU of params.yaml: those that depend on resources.device. Empty on the CPU."""
    if not str(_resources(root).get("device", "cpu")).startswith("cuda"):
        return frozenset()
    return frozenset(name for name, entry in _stages(root).items() if "resources.device" in entry.get("params", []))


def default_jobs(root: Path = ROOT) -> int:
    """How many items fit on this machine's cores, at resources.workers processes of resources.threads threads each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    resources = _resources(root)
    return max(1, cores // (int(resources.get("threads", 1)) * int(resources.get("workers", 2))))


def _resources(root: Path) -> dict[str, Any]:
    return (read_params(root).get("resources") or {}) if (root / "params.yaml").exists() else {}


def read_params(root: Path) -> dict[str, Any]:
    """params.yaml, its values unchecked. Raises StageFailedError if it is not a mapping in UTF-8."""
    path = root / "params.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StageFailedError(f"cannot read {path}: {error}", BAD_PARAMETERS) from error
    if not isinstance(values, dict):
        raise StageFailedError(f"{path} must be a mapping of sections", BAD_PARAMETERS)
    return values


def run_stage(
    stage: str,
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    echo: Echo = print,
    children: ChildProcesses | None = None,
) -> StageResult:
    """Bring one stage (all its items) or one item up to date by `dvc repro`. Raises StageFailedError."""
    found: dict[str, list[str]] = {state: [] for state in _STATES}
    code: int | None = None

    def read(line: str) -> None:
        nonlocal code
        echo(line)
        if match := _EXIT_CODE.match(line):
            code = int(match[1])
        for state, pattern in _STATES.items():
            if match := pattern.match(line):
                found[state].append(match[1])

    command = ["-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage]
    returned, tail = run_supervised(command, root, python_environment(**(environment or {})), read, children)
    if returned:
        reason = f"exit code {returned if code is None else code}"
        if code == BAD_PARAMETERS:
            reason += ": bad parameters or input, a retry cannot help"
        message = f"stage {stage} failed ({reason}). Its last output:{quoted(tail)}\nTo run it alone: dvc repro {stage}"
        raise StageFailedError(message, code)
    return StageResult(**{state: tuple(names) for state, names in found.items()})


def refresh_packages(root: Path = ROOT, environment: Mapping[str, str] | None = None, echo: Echo = print) -> None:
    """Let DVC see changed plugin packages, as plain `dvc repro` does first; single stages do not. Raises StageFailedError."""
    if (root / PACKAGES).exists():
        run_stage(PACKAGES.as_posix(), root, environment, echo)


def run_items(
    items: Sequence[str],
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    echo: Echo = print,
    jobs: int = 1,
    tick: Callable[[], None] = lambda: None,
) -> StageResult:
    """Bring independent `items` up to date, `jobs` DVC commands at a time; `tick` is called every few seconds.

    When an item fails, the others finish first; then the first StageFailedError is raised.
    """
    children = ChildProcesses()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_stage, item, root, environment, echo, children) for item in items]
        pending: set[Future[StageResult]] = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=TICK_S, return_when=FIRST_COMPLETED)
                if any(isinstance(future.exception(), SystemExit) for future in done):  # standard output was closed
                    children.terminate()
                tick()
        except BaseException:
            children.terminate()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # An error that no retry can cure comes first: it decides whether the stage is retried.
        final = (error for error in errors if isinstance(error, SystemExit) or getattr(error, "bad_parameters", False))
        raise next(final, errors[0])
    return StageResult.joined(future.result() for future in futures)
