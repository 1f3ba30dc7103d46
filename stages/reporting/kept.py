"""Kept runs, which later runs are compared with: reports/runs.jsonl, one line per run, oldest first.

The file is in git and an input of the report, so the page shows changes and times and is still a function of its inputs.
`python -m stages.reporting.keep` adds a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from stages.records.sections import params_hash
from stages.runtime.files import atomic_text
from stages.runtime.validation import Section, explain

FILE = Path("reports") / "runs.jsonl"
EPISODES = Path("data") / "kept"
"""Folder of the kept runs' episodes; not in git."""


class Success(Section):
    """Share of successful attempts, with its interval over `n` tasks."""

    mean: float
    low: float
    high: float
    n: int


class Work(Section):
    """Machine-independent counts of a stage's work; None where not applicable."""

    episodes: int | None = None
    environment_steps: int | None = None
    steps: int | None = None
    """Optimiser steps (sft), iterations (rl), simulations (annotate)."""
    sampled_tokens: int | None = None
    """Tokens sampled from a policy."""
    trained_tokens: int | None = None
    """Tokens in the loss, summed over epochs."""


def total(items: Sequence[Work], name: str) -> int | None:
    """Sum of one count over those that have it; None if none has."""
    values = [value for item in items if (value := getattr(item, name)) is not None]
    return sum(values) if values else None


class Measured(Section):
    """Time and memory of a stage on the machine it ran on; fields as in stages.runtime.costs.Cost."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    peak_gpu_bytes: int
    machine: str
    runs: int
    peak_tree_bytes: int = 0
    cores: int = 0
    spans: dict[str, float] = Field(default_factory=dict)
    """Empty in runs kept before spans were measured."""
    beside: dict[str, float] = Field(default_factory=dict)
    counts: dict[str, int] = Field(default_factory=dict)


class Run(Section):
    """What is stored of one run."""

    params: dict[str, Any]
    """The resolved parameters."""
    code: dict[str, str]
    """Part of stages/ that affects results -> its hash."""
    panels: dict[str, str]
    """Domain -> hash of its evaluation panel."""
    success: dict[str, dict[str, Success]]
    """Model -> domain -> success."""
    solved: dict[str, dict[str, list[int]]]
    """Model -> domain -> successful attempts per task, tasks sorted by id; for paired tests."""
    work: dict[str, Work]
    """DVC stage (`rl@search`) -> its work."""
    attempts: int = Field(ge=1)
    """Per task of the panels."""
    commit: str = ""
    """Commit at which the run was kept, followed by `+` if there were uncommitted changes."""
    note: str = ""
    measured: dict[str, Measured] = Field(default_factory=dict)
    """Stage -> time and memory, except for stages restored from DVC's cache."""

    @property
    def identity(self) -> tuple[str, Mapping[str, str], Mapping[str, Any]]:
        """Equal for two runs with the same parameters, code and outcomes."""
        return params_hash(self.params), self.code, {"panels": self.panels, "solved": self.solved}


def read_kept(root: Path) -> list[Run]:
    """All kept runs, oldest first; [] without the file. Raises ValueError naming line and field of an invalid one."""
    path = root / FILE
    if not path.exists():
        return []
    runs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        source = f"{FILE}, line {number}"
        try:
            runs.append(Run.model_validate_json(line))
        except ValidationError as error:
            raise ValueError(f"{explain(error, Run, source)}\nRemove the line, or restore the file with git") from error
    return runs


def append(root: Path, run: Run) -> None:
    """Add `run` to the file, keys sorted."""
    path = root / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes().decode() if path.exists() else ""
    if before and not before.endswith("\n"):  # as some editors leave it
        before += "\n"
    atomic_text(path, f"{before}{json.dumps(run.model_dump(mode='json'), sort_keys=True, separators=(',', ':'))}\n")


def episodes_path(root: Path, run: Run) -> Path:
    """Where the evaluation's episodes of a kept run are, on the machine that kept it."""
    parameters, code, outcomes = run.identity
    return root / EPISODES / f"{params_hash([parameters, dict(code), dict(outcomes)])}.parquet"


def newest(now: Run, kept: Sequence[Run], identical: bool) -> tuple[int, Run] | None:
    """(number from 1, run): the newest kept run that is (or, if not `identical`, is not) `now` itself; None if there is none."""
    for number in range(len(kept), 0, -1):
        if (kept[number - 1].identity == now.identity) == identical:
            return number, kept[number - 1]
    return None
