"""The pipeline as dvc.yaml describes it, and one DVC command per stage. Knows nothing of Prefect or of the stages' work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
_STARTED = re.compile(r"^Running stage '([^']+)'")
_RESTORED = re.compile(r"^Stage '([^']+)' is cached")
_SKIPPED = re.compile(r"^Stage '([^']+)' didn't change")


class StageFailedError(RuntimeError):
    """DVC could not bring a stage up to date; its own output says why."""


@dataclass(frozen=True)
class Done:
    """What DVC did for one stage of dvc.yaml: the names (`rl@search`) that ran, were restored from its cache, were up to date."""

    ran: tuple[str, ...]
    restored: tuple[str, ...]
    unchanged: tuple[str, ...]

    def __str__(self) -> str:
        parts = [("ran", self.ran), ("restored from cache", self.restored), ("up to date", self.unchanged)]
        return "; ".join(f"{word}: {', '.join(names)}" for word, names in parts if names) or "nothing to do"


def _paths(entry: Mapping[str, Any], kinds: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for kind in kinds:
        for item in entry.get(kind, []):
            found.extend([item] if isinstance(item, str) else item)
    return found


def _overlap(dependency: str, output: str) -> bool:
    """Whether one path is the other or lies in it; `${item.domain}` stands for any name."""
    pattern = re.compile(r"\$\{item\.[^}]+\}")
    a, b = pattern.sub("*", dependency).split("/"), pattern.sub("*", output).split("/")
    return all("*" in (x, y) or x == y for x, y in zip(a, b, strict=False))


def stage_graph(root: Path = ROOT) -> dict[str, list[str]]:
    """Stage -> the stages it depends on, in an order in which they can run. A matrix stage is one entry.

    Raises FileNotFoundError without dvc.yaml, graphlib.CycleError if the stages depend on each other in a circle.
    """
    stages = yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
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


def run_stage(
    stage: str, root: Path = ROOT, environment: Mapping[str, str] | None = None, echo: Callable[[str], None] = print
) -> Done:
    """Bring one stage (all its domains) up to date; lines are echoed as they come. Raises StageFailedError."""
    dvc = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", stage]
    command = [sys.executable, "-m", "flows.supervise", *dvc]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    inherited = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    found: dict[str, list[str]] = {"ran": [], "restored": [], "unchanged": []}
    with subprocess.Popen(
        command, cwd=root, env={**inherited, **(environment or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                line = line.rstrip("\n")
                echo(line)
                for key, pattern in (("ran", _STARTED), ("restored", _RESTORED), ("unchanged", _SKIPPED)):
                    if match := pattern.match(line):
                        found[key].append(match[1])
        except BaseException:
            child.terminate()
            raise
    if child.returncode != 0:
        raise StageFailedError(
            f"stage {stage} failed (exit code {child.returncode}); what it said stands above. Run it alone: dvc repro {stage}"
        )
    return Done(tuple(found["ran"]), tuple(found["restored"]), tuple(found["unchanged"]))
