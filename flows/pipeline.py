"""The pipeline as dvc.yaml describes it, and one DVC command per stage. Knows nothing of Prefect or of the stages' work."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from threading import Lock
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BAD_PARAMETERS = 2
"""Exit code of a stage that its parameters or input keep from running: trying again cannot help."""
TICK_S = 2.0
WORDS_KEPT = 12
"""Lines of a failing stage's output that its error quotes."""
_ANY = re.compile(r"\$\{item\.[^}]+\}")
_STARTED = re.compile(r"^Running stage '([^']+)'")
_RESTORED = re.compile(r"^Stage '([^']+)' is cached")
_SKIPPED = re.compile(r"^Stage '([^']+)' didn't change")
_EXITED = re.compile(r"^ERROR: failed to reproduce '[^']+': failed to run: .*, exited with (-?\d+)$")
_NOISE = re.compile(r"^(Running stage '|> |ERROR: failed to reproduce '|\s*$)")


class StageFailedError(RuntimeError):
    """DVC could not bring a stage up to date. `code`: exit code of the stage's own command, None if DVC did not get to it."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code)

    @property
    def bad_parameters(self) -> bool:
        return self.code == BAD_PARAMETERS


@dataclass(frozen=True)
class Done:
    """What DVC did for one stage of dvc.yaml: the names (`rl@search`) that ran, were restored from its cache, were up to date."""

    ran: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [("ran", self.ran), ("restored from cache", self.restored), ("up to date", self.unchanged)]
        return "; ".join(f"{word}: {', '.join(names)}" for word, names in parts if names) or "nothing to do"

    @property
    def verdict(self) -> str:
        """One word for all of it: what took most work."""
        return "Ran" if self.ran else "Restored" if self.restored else "UpToDate"

    @classmethod
    def joined(cls, parts: Iterable[Done]) -> Done:
        parts = list(parts)
        return cls(*(tuple(name for part in parts for name in getattr(part, key)) for key in ("ran", "restored", "unchanged")))


def _paths(entry: Mapping[str, Any], kinds: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for kind in kinds:
        for item in entry.get(kind, []):
            found.extend([item] if isinstance(item, str) else item)
    return found


def _overlap(dependency: str, output: str) -> bool:
    """Whether one path is the other or lies in it; `${item.domain}` stands for any name."""
    a, b = _ANY.sub("*", dependency).split("/"), _ANY.sub("*", output).split("/")
    return all("*" in (x, y) or x == y for x, y in zip(a, b, strict=False))


def _stages(root: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


def stage_graph(root: Path = ROOT) -> dict[str, list[str]]:
    """Stage -> the stages it depends on, in an order in which they can run. A matrix stage is one entry.

    Raises FileNotFoundError without dvc.yaml, graphlib.CycleError if the stages depend on each other in a circle.
    """
    stages = _stages(root)
    outputs = {name: _paths(entry, ("outs", "metrics", "plots")) for name, entry in stages.items()}
    needs = {
        name: [
            other
            for other in stages
            if other != name and any(_overlap(dep, out) for dep in _paths(entry, ("deps",)) for out in outputs[other])
        ]
        for name, entry in stages.items()
    }
    return {name: needs[name] for name in TopologicalSorter(needs).static_order()}


def sources(root: Path = ROOT) -> list[str]:
    """What the stages depend on and none of them makes, reports aside, as patterns of paths: code, raw data."""
    stages = _stages(root)
    made = [out for entry in stages.values() for out in _paths(entry, ("outs", "metrics", "plots"))]
    needed = {dep for entry in stages.values() for dep in _paths(entry, ("deps",))}
    given = [dep for dep in needed if not dep.startswith("reports/") and not any(_overlap(dep, out) for out in made)]
    return sorted(_ANY.sub("*", dep) for dep in given)


def stage_items(root: Path = ROOT) -> dict[str, list[str]]:
    """Stage -> what DVC makes of it: itself, or one name per cell of its matrix (`rl@textworld`). Raises StageFailedError."""
    command = [sys.executable, "-m", "dvc", "stage", "list", "--name-only"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if listed.returncode:
        raise StageFailedError(f"dvc stage list failed in {root}: {listed.stderr.strip()}", BAD_PARAMETERS)
    items: dict[str, list[str]] = {name: [] for name in _stages(root)}
    for item in listed.stdout.split():
        items[item.split("@")[0]].append(item)
    return items


def on_gpu(root: Path = ROOT) -> frozenset[str]:
    """The stages that use the GPU that params.yaml names: those that depend on resources.device. None if that is the CPU."""
    if not str(_resources(root).get("device", "cpu")).startswith("cuda"):
        return frozenset()
    return frozenset(name for name, entry in _stages(root).items() if "resources.device" in entry.get("params", []))


def side_by_side(root: Path = ROOT) -> int:
    """How many stages the cores of this machine carry at once, at the threads per stage that params.yaml asks for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(_resources(root).get("threads", 1)))


def _resources(root: Path) -> dict[str, Any]:
    return (read_params(root).get("resources") or {}) if (root / "params.yaml").exists() else {}


def read_params(root: Path) -> dict[str, Any]:
    """params.yaml as it stands, its values unchecked. Raises StageFailedError where it is no mapping in UTF-8."""
    path = root / "params.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StageFailedError(f"{path} can't be read: {error}", BAD_PARAMETERS) from error
    if not isinstance(values, dict):
        raise StageFailedError(f"{path} must hold a mapping of sections", BAD_PARAMETERS)
    return values


class Children:
    """The processes at work, so that all of them can be ended from the thread that waits for them."""

    def __init__(self) -> None:
        self._lock, self._running, self._closed = Lock(), set[subprocess.Popen](), False

    def start(self, command: list[str], **options: Any) -> subprocess.Popen:
        with self._lock:
            if self._closed:
                raise StageFailedError("the run was ended")
            child = subprocess.Popen(command, **options)
            self._running.add(child)
            return child

    def ended(self, child: subprocess.Popen) -> None:
        with self._lock:
            self._running.discard(child)

    def end(self) -> None:
        """Ask all to end, and let none start any more."""
        with self._lock:
            self._closed = True
            for child in self._running:
                child.terminate()

    def end_and_wait(self, within_s: float) -> None:
        """`end`, and wait until all have ended, or for `within_s`."""
        self.end()
        deadline = time.monotonic() + within_s
        with self._lock:
            left = tuple(self._running)
        for child in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))


def run_stage(
    stage: str,
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    echo: Callable[[str], None] = print,
    children: Children | None = None,
) -> Done:
    """Bring one stage (all its domains) or one of its items up to date; lines are echoed as they come.

    Raises StageFailedError.
    """
    dvc = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    source = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    found: dict[str, list[str]] = {"ran": [], "restored": [], "unchanged": []}
    words: deque[str] = deque(maxlen=WORDS_KEPT)
    code: int | None = None
    children = children or Children()
    with children.start(
        [sys.executable, "-m", "flows.supervise", *dvc],
        cwd=root,
        env={**os.environ, "PATH": path, "PYTHONPATH": source, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                line = line.rstrip("\n")
                echo(line)
                if match := _EXITED.match(line):
                    code = int(match[1])
                if not _NOISE.match(line):
                    words.append(line)
                for key, pattern in (("ran", _STARTED), ("restored", _RESTORED), ("unchanged", _SKIPPED)):
                    if match := pattern.match(line):
                        found[key].append(match[1])
        except BaseException:
            child.terminate()
            raise
    children.ended(child)
    if child.returncode != 0:
        raise StageFailedError(_explain(stage, child.returncode, code, words), code)
    return Done(tuple(found["ran"]), tuple(found["restored"]), tuple(found["unchanged"]))


def _explain(stage: str, returned: int, code: int | None, words: Iterable[str]) -> str:
    why = f"exit code {returned if code is None else code}"
    if code == BAD_PARAMETERS:
        why += ", its parameters or input: trying again cannot help"
    said = "".join(f"\n    {line}" for line in words)
    return f"stage {stage} failed ({why}). It said:{said}\nRun it alone: dvc repro {stage}"


def run_group(
    items: Sequence[str],
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    echo: Callable[[str], None] = print,
    jobs: int = 1,
    tick: Callable[[], None] = lambda: None,
) -> Done:
    """Bring `items`, none of which depends on another, up to date, `jobs` DVC commands at once.

    `tick` is called every few seconds. An item that fails leaves the others at work; the first StageFailedError is raised when
    all have come to their end.
    """
    children = Children()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_stage, item, root, environment, echo, children) for item in items]
        waiting: set[Future[Done]] = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=TICK_S, return_when=FIRST_COMPLETED)
                if any(isinstance(future.exception(), SystemExit) for future in done):  # nobody reads what is echoed any more
                    children.end()
                tick()
        except BaseException:
            children.end()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # What cannot be cured goes first: it decides whether the stage is tried again.
        final = (error for error in errors if isinstance(error, SystemExit) or getattr(error, "bad_parameters", False))
        raise next(final, errors[0])
    return Done.joined(future.result() for future in futures)
