"""Runs that were kept to compare later ones with: reports/runs.jsonl, one line per run, oldest first.

The file is an input of the report like any other and belongs to git: the page says what changed since an earlier run and how long
things took, and yet the same inputs give the same bytes. `python -m stages.reporting.keep` adds a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from stages.records.sections import params_hash
from stages.runtime.validation import Section, explain

FILE = Path("reports") / "runs.jsonl"


class Success(Section):
    """Share of attempts that succeed, with its interval over `n` tasks."""

    mean: float
    low: float
    high: float
    n: int


class Work(Section):
    """What a stage did, counted: it does not depend on the machine. None where a stage has no such thing."""

    episodes: int | None = None
    steps: int | None = None
    """Optimiser steps (sft), iterations (rl), simulations (annotate)."""
    sampled_tokens: int | None = None
    """Tokens that a policy wrote."""
    trained_tokens: int | None = None
    """Tokens that went into a loss, repeats in later epochs included."""


class Measured(Section):
    """What a stage took on the machine it ran on."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    peak_gpu_bytes: int
    machine: str
    runs: int


class Run(Section):
    """One run, as far as a later one is compared with it."""

    params: dict[str, Any]
    """params.yaml as it resolves."""
    code: dict[str, str]
    """Part of stages/ that bears on results -> hash of it."""
    panels: dict[str, str]
    """Domain -> hash of its evaluation panel."""
    success: dict[str, dict[str, Success]]
    """Model -> domain -> success."""
    solved: dict[str, dict[str, list[int]]]
    """Model -> domain -> successful attempts at each task, tasks sorted by id; what makes a paired test possible."""
    work: dict[str, Work]
    """Stage as DVC calls it (`rl@search`) -> what it did."""
    attempts: int = Field(ge=1)
    """Per task of the panels."""
    commit: str = ""
    """Commit that was checked out when the run was kept, with `+` behind it if files had been changed since."""
    note: str = ""
    measured: dict[str, Measured] = Field(default_factory=dict)
    """Stage -> what it took; without stages that were restored from DVC's cache."""

    @property
    def identity(self) -> tuple[str, Mapping[str, str], Mapping[str, Any]]:
        """Two runs with the same parameters, code and outcomes are one run made twice."""
        return params_hash(self.params), self.code, {"panels": self.panels, "solved": self.solved}


def read_kept(root: Path) -> list[Run]:
    """All kept runs, oldest first; [] without the file. Raises ValueError naming line and field for one that cannot be read."""
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
            raise ValueError(f"{explain(error, Run, source)}\nTake the line out, or restore the file with git") from error
    return runs


def append(root: Path, run: Run) -> None:
    """Add `run` to the file, keys sorted."""
    path = root / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(run.model_dump(mode="json"), sort_keys=True, separators=(",", ":")) + "\n")


def same(a: Run, b: Run) -> bool:
    return a.identity == b.identity


def previous(now: Run, kept: Sequence[Run]) -> tuple[int, Run] | None:
    """(number from 1, run): the newest kept run that is not `now` itself; None if there is none."""
    for number in range(len(kept), 0, -1):
        if not same(kept[number - 1], now):
            return number, kept[number - 1]
    return None


def itself(now: Run, kept: Sequence[Run]) -> tuple[int, Run] | None:
    """(number from 1, run): the newest kept run that is `now`; None if it was not kept."""
    for number in range(len(kept), 0, -1):
        if same(kept[number - 1], now):
            return number, kept[number - 1]
    return None
