"""What runs did task by task, and while they learnt: reports/claims/rows/<slug>.parquet and reports/claims/curves/<slug>.parquet.

Claims are judged over seeds and clusters of tasks by these rows; a metric that nobody asked for when a run was made can be
computed from them later."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stages.claims.experiment import FOLDER
from stages.evaluation.statistics import pass_at_k
from stages.records.episode import read_rows, write_table

Row = dict[str, Any]
MEANS = ("reward", "turns", "tokens", "accepted", "cost")
RUN = [("arm", pa.string()), ("seed", pa.int32())]
ROWS_SCHEMA = pa.schema(
    [
        *RUN,
        ("task_id", pa.string()),
        ("cluster", pa.string()),
        ("difficulty", pa.float64()),
        ("attempts", pa.int16()),
        ("successes", pa.int16()),
        *((name, pa.float32()) for name in MEANS),
    ]
)
"""One row per run and task of the panel, sorted; MEANS are over the attempts."""
SMOOTHED = 5
"""Training steps whose mean success counts as reached."""
COLUMNS = ("success", "reward_mean", "entropy", "pair_accuracy", "loss")
CURVES_SCHEMA = pa.schema(
    [*RUN, ("step", pa.int32()), ("environment_steps", pa.int64()), *((name, pa.float32()) for name in COLUMNS)]
)
"""One row per run and training step, sorted; null where the method has no such column. `environment_steps`: of this step only."""


def _single(value: float) -> float:
    """As it will be read from the file: verdicts are the same before and after."""
    return float(np.float32(value))


def task_rows(attempts: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of ROWS_SCHEMA (without arm and seed) of one model's evaluation rows, sorted by task."""
    found = []
    for task_id, grouped in groupby(sorted(attempts, key=lambda row: row["task_id"]), key=lambda row: row["task_id"]):
        of_task = list(grouped)
        row = {"task_id": task_id, "cluster": of_task[0]["cluster"], "difficulty": of_task[0]["difficulty"]}
        row |= {"attempts": len(of_task), "successes": sum(one["success"] for one in of_task)}
        found.append(row | {name: _single(sum(one[name] for one in of_task) / len(of_task)) for name in MEANS})
    return found


def curve_rows(history: Path) -> list[Row]:
    """Rows of CURVES_SCHEMA (without arm and seed) of a reports/rl/<domain>_history.csv; [] without the file."""
    if not history.exists():
        return []
    with history.open(encoding="utf-8") as handle:
        lines = list(csv.DictReader(handle))
    return [
        {"step": int(line["step"]), "environment_steps": int(line.get("environment_steps") or 0)}
        | {name: _single(float(line[name])) if line.get(name) else None for name in COLUMNS}
        for line in lines
    ]


def curve_of(steps: Sequence[Row], column: str, played: bool) -> tuple[np.ndarray, np.ndarray]:
    """(places on the axis of training, values), [N] each, of a run's training steps that have `column`. `played`: places are the
    environment steps so far; else training steps."""
    places = np.cumsum([step["environment_steps"] for step in steps]) if played else np.array([step["step"] for step in steps])
    values = np.array([step.get(column) for step in steps], dtype=float)
    known = ~np.isnan(values)
    return places[known].astype(float), values[known]


def window_mean(values: Sequence[float], part: str) -> float:
    """Mean over all values, or over the first or last fifth of them. Raises KeyError for another part, ZeroDivisionError for no
    values."""
    window = max(1, len(values) // 5)
    chosen = {"mean": values, "first": values[:window], "last": values[-window:]}[part]
    return sum(chosen) / len(chosen)


def steps_to_success(successes: Sequence[float], steps: Sequence[float], share: float, budget: float) -> float:
    """Environment steps until the mean success of SMOOTHED training steps reaches `share`; `budget` if it never does, so that a
    run that is not there yet counts as slow instead of missing. `steps`: played in each training step."""
    for end in range(SMOOTHED, len(successes) + 1):
        if sum(successes[end - SMOOTHED : end]) >= SMOOTHED * share:
            return min(float(sum(steps[:end])), budget)
    return budget


def _reached(curve: Sequence[Row], share: float) -> float | None:
    """`steps_to_success` of a run's training steps; None unless a step before the last one reaches it: the budget, which the
    tables lack, may end in the last."""
    if any(row.get("success") is None for row in curve):
        return None
    steps = [float(row["environment_steps"]) for row in curve]
    # Rates in the tables are rounded to single precision.
    found = steps_to_success([row["success"] for row in curve], steps, share - 1e-7, sum(steps))
    return found if found < sum(steps) else None


def of_tasks(metric: str, rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """A panel metric's value at each task that it is about; [] if rows do not determine it."""
    kind, _, key = metric.partition(".")
    if kind != "panel":
        return []
    if key in MEANS:
        return [(row, float(row[key])) for row in rows]
    name, _, argument = key.partition(".")
    if name == "pass_at_k":
        k = int(argument)
        enough = all(row["attempts"] >= k for row in rows)
        return [(row, pass_at_k(row["attempts"], row["successes"], k)) for row in rows] if enough else []
    if name not in ("success", "difficulty"):
        return []
    return [
        (row, row["successes"] / row["attempts"]) for row in rows if name == "success" or f"{row['difficulty']:g}" == argument
    ]


@dataclass
class Tables:
    """Rows and curves by the run's name, `<arm>/<seed>`."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    curves: dict[str, list[Row]] = field(default_factory=dict)

    @classmethod
    def load(cls, root: Path, slug: str) -> Tables:
        """The stored tables of an experiment; empty where there are none."""
        return cls(*(_by_run(path) for path in paths(root, slug)))

    def drop_others(self, kept: set[str]) -> None:
        """Drop the tables of other runs."""
        for table in (self.rows, self.curves):
            for run in set(table) - kept:
                del table[run]

    def copy(self, other: Tables, source: str, target: str) -> None:
        """Copy a run's tables from another experiment."""
        for mine, theirs in ((self.rows, other.rows), (self.curves, other.curves)):
            mine.pop(target, None)
            if source in theirs:
                mine[target] = theirs[source]

    def write(self, root: Path, slug: str) -> None:
        """Write both files, if there is anything to write; the same tables give the same bytes."""
        for path, schema, table in zip(paths(root, slug), (ROWS_SCHEMA, CURVES_SCHEMA), (self.rows, self.curves), strict=True):
            if table or path.exists():
                ordered = sorted((arm, int(seed), run) for run in table for arm, _, seed in [run.rpartition("/")])
                write_table(path, schema, ({"arm": arm, "seed": seed, **row} for arm, seed, run in ordered for row in table[run]))

    def value(self, run: str, metric: str) -> float | None:
        """The run's value of a metric of `panel` or `history`; None if the tables do not determine it."""
        if found := of_tasks(metric, self.rows.get(run, [])):
            return sum(value for _, value in found) / len(found)
        kind, _, key = metric.partition(".")
        column, _, part = key.rpartition(".")
        if kind == "history" and column == "steps_to_success":
            return _reached(self.curves.get(run, []), int(part) / 100)
        if kind != "history" or column not in COLUMNS:
            return None
        values = [row[column] for row in self.curves.get(run, []) if row.get(column) is not None]
        return window_mean(values, part) if values and part in ("mean", "first", "last") else None


def paths(root: Path, slug: str) -> tuple[Path, Path]:
    """Files of the rows and of the curves."""
    folder = root / FOLDER
    return folder / "rows" / f"{slug}.parquet", folder / "curves" / f"{slug}.parquet"


def _by_run(path: Path) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in read_rows(path) if path.exists() else []:
        found.setdefault(f"{row.pop('arm')}/{row.pop('seed')}", []).append(row)
    return found
