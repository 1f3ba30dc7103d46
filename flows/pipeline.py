"""The pipeline as dvc.yaml describes it, and one DVC command per stage. Independent of Prefect and of the stages' work."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import psutil
import yaml

from flows import arguments
from flows.checkout import run_lock
from flows.process import (
    BAD_PARAMETERS,
    ROOT,
    STOPPED,
    ChildProcesses,
    Echo,
    StageFailedError,
    capture,
    python_environment,
    quoted,
    run_supervised,
)
from flows.schedule import run_graph
from stages.runtime.command import command
from stages.runtime.cores import available_cores
from stages.runtime.yaml_files import read_yaml

PACKAGES = Path("data/packages/dvc.yaml")
_ITEM = re.compile(r"\$\{item\.[^}]+\}")
_STATES = {
    "ran": re.compile(r"^Running stage '([^']+)'"),
    "restored": re.compile(r"^Stage '([^']+)' is cached"),
    "unchanged": re.compile(r"^Stage '([^']+)' didn't change"),
}
_HINT = re.compile(
    r"^(Use `dvc push`|To track the changes with git|To enable auto staging|\tgit add |\tdvc config core.autostage)"
)
"""What DVC advises after each stage."""
TIMES_WEIGHTS = 13
"""Memory that a training stage takes, as a multiple of its base model's files: measured with Gemma 3 270M and two workers."""
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
    return read_yaml(root / "dvc.yaml")["stages"]


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


def item_graph(root: Path = ROOT) -> dict[str, list[str]]:
    """Item -> the items that it depends on, in an order in which they can run: `rl@search` needs `curate@search`, not
    `curate@textworld`. Raises StageFailedError."""
    stages, outputs, dependencies = _stages(root), {}, {}
    for item in (item for items in stage_items(root).values() for item in items):
        name, _, cell = item.partition("@")
        outputs[item] = [_ITEM.sub(cell, path) for path in _paths(stages[name], ("outs", "metrics", "plots"))]
        dependencies[item] = [_ITEM.sub(cell, path) for path in _paths(stages[name], ("deps",))]
    needs = {
        item: [other for other in outputs if other != item and any(_overlap(dep, out) for dep in deps for out in outputs[other])]
        for item, deps in dependencies.items()
    }
    return {item: needs[item] for item in TopologicalSorter(needs).static_order()}


def up_to(stage: str | None, root: Path = ROOT) -> dict[str, list[str]]:
    """The items of the stages up to `stage`, in the lifecycle's order; all for None. Raises StageFailedError."""
    stages, needs = list(stage_graph(root)), item_graph(root)
    wanted = stages if stage is None else stages[: stages.index(stage) + 1]
    return {item: others for item, others in needs.items() if item.split("@")[0] in wanted}


def outdated(root: Path = ROOT) -> dict[str, list[str]]:
    """The part of `item_graph` to run: items that DVC finds changed, and those that depend on them. Raises StageFailedError."""
    done = capture([sys.executable, "-m", "dvc", "status", "--json", "dvc.yaml"], root)
    if done.returncode:
        raise StageFailedError(f"dvc status failed in {root}: {done.stderr.strip()}", BAD_PARAMETERS)
    changed = json.loads(done.stdout)
    found: dict[str, list[str]] = {}
    for item, others in item_graph(root).items() if changed else ():
        if item in changed or any(other in found for other in others):
            found[item] = [other for other in others if other in found]
    return found


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


def concurrent_stages(root: Path = ROOT) -> int:
    """Two items at a time: while one starts, ends or waits for its slowest process, the other has the cores. One on one core, and
    where memory may not hold two (TIMES_WEIGHTS)."""
    path = str((read_params(root).get("model") or {}).get("path", "")) if (root / "params.yaml").exists() else ""
    weights = sum(file.stat().st_size for file in (root / path).glob("*.safetensors")) if path else 0
    crowded = path.startswith("hub:") or 2 * TIMES_WEIGHTS * weights > psutil.virtual_memory().total
    return 1 if crowded else min(2, available_cores())


def _resources(root: Path) -> dict[str, Any]:
    return (read_params(root).get("resources") or {}) if (root / "params.yaml").exists() else {}


def read_params(root: Path) -> dict[str, Any]:
    """params.yaml, its values unchecked. Raises StageFailedError if it is not a mapping in UTF-8."""
    return read_settings(root / "params.yaml")


def read_settings(path: Path) -> dict[str, Any]:
    """A file in the format of params.yaml, its values unchecked. Raises StageFailedError if it is not a mapping in UTF-8."""
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
        if not _HINT.match(line):
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
        if code == STOPPED:
            raise StageFailedError(f"stage {stage} was stopped, as requested; it goes on from there when it is run again", code)
        message = f"stage {stage} failed ({reason}). Its last output:{quoted(tail)}\nTo run it alone: dvc repro {stage}"
        raise StageFailedError(message, code)
    return StageResult(**{state: tuple(names) for state, names in found.items()})


def refresh_packages(root: Path = ROOT, environment: Mapping[str, str] | None = None, echo: Echo = print) -> None:
    """Let DVC see changed plugin packages, as plain `dvc repro` does first; single stages do not. Raises StageFailedError."""
    if (root / PACKAGES).exists():
        run_stage(PACKAGES.as_posix(), root, environment, echo)


def run_items(
    needs: Mapping[str, Iterable[str]],
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    echo: Echo = print,
    jobs: int = 1,
    tick: Callable[[], None] = lambda: None,
    children: ChildProcesses | None = None,
) -> dict[str, StageResult]:
    """Bring the items of a graph (`item_graph`) up to date, `jobs` DVC commands at a time; see `run_graph`."""
    on_gpu = gpu_stages(root)
    with ThreadPoolExecutor(jobs) as pool, children or ChildProcesses() as running:
        return run_graph(
            needs,
            lambda item: pool.submit(run_stage, item, root, environment, echo, running),
            jobs,
            {item for item in needs if item.split("@")[0] in on_gpu},
            tick,
        )


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.pipeline",
        description="Bring the pipeline up to date; stages that need nothing of each other run side by side.",
    )
    parser.add_argument(
        "--jobs", type=arguments.stages_at_once, metavar="N", help="stages at a time (default: two, if cores and memory allow)"
    )
    options = parser.parse_args()
    try:
        with run_lock(ROOT):
            refresh_packages()
            needs, jobs = outdated(), options.jobs or concurrent_stages()
            print(f"lifecycle: {len(needs)} stages to run, {jobs} at a time" if needs else "lifecycle: up to date", flush=True)
            run_items(needs, jobs=jobs)
    except StageFailedError as error:
        print(f"lifecycle: {error}", file=sys.stderr)
        return BAD_PARAMETERS if error.bad_parameters else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
