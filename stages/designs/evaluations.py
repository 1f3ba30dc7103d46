"""Evaluations of designs: the ordinary stage `evaluate` plays them in copies of the checkout.

`.bellwether/design/<key>`, the key a hash of what an evaluation depends on (models, tasks, code, settings), holds two workspaces,
`search` and `confirm`, which differ in their validation tasks, and the results of every evaluation, one JSON file and one Parquet
file per design. Later searches, by any method, read these instead of playing again: files of our own rather than Optuna's
storage, which has no place for rows or for results that studies share.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stages.designs.settings import SearchParams
from stages.designs.space import Design, Space
from stages.designs.tasks import DomainTasks, choose_tasks
from stages.designs.value_model import describe
from stages.records.episode import read_json, read_rows, write_json, write_tasks
from stages.records.sections import deep_merge, params_hash
from stages.records.task import Task
from stages.runtime.lineage import dvc_hash, identity, input_hashes
from stages.runtime.workspace import EvaluationWorkspace, link_tree

FOLDER = Path(".bellwether") / "design"
SPLITS = ("search", "confirm")
PLAN = "plan.json"
ROWS = Path("data/evaluation/rows.parquet")
RESAMPLES = 100
"""Of confidence intervals that are not used."""
DIGITS = 6
EVALUATED: dict[str, Any] = {
    **dict.fromkeys(("seed", "domains", "model", "evaluate"), True),
    "resources": {
        **dict.fromkeys(("device", "precision", "tokens_per_batch"), True),
        "engine": dict.fromkeys(("kind", "dialect", "text"), True),
    },
}
"""What of params.yaml decides the outcome of an evaluation, for pydantic's `include`; other resources change its speed."""


def workspace_key(root: Path, params: SearchParams) -> str:
    """16 hex digits over what the scores of designs depend on: files, as dvc.yaml lists them for evaluate, and settings."""
    evaluated = params.model_dump(mode="json", include=EVALUATED)
    scored = params.design.model_dump(mode="json", include={"tasks", "attempts", "metric"})
    files = identity(input_hashes(root, "evaluate", None))
    return params_hash({**evaluated, "design": scored, "confirm": params.design.confirm.tasks, "files": files})


def fill_workspace(
    workspace: EvaluationWorkspace, root: Path, params: SearchParams, tasks: Mapping[str, tuple[DomainTasks, Sequence[Task]]]
) -> None:
    """Give it the code, models and panels of the checkout `root`, and per domain the validation tasks to play."""
    workspace.update_code(root)
    for name in {"data/models", params.model.path if not params.model.path.startswith("hub:") else "data/models"}:
        link_tree(root / name, workspace.folder / name)
    for name, (chosen, valid) in tasks.items():
        curated, folder = root / "data" / "curated" / name, workspace.folder / "data" / "curated" / name
        link_tree(curated / "worlds", folder / "worlds")
        link_tree(chosen.worlds, folder / "worlds")
        shutil.copy2(curated / "panel.json", folder / "panel.json")
        write_tasks(folder / "tasks.parquet", [*chosen.panel.tasks, *valid])


@dataclass(frozen=True)
class DesignScore:
    """The score of one design, per domain and averaged, each with a standard error."""

    score: float
    error: float
    by_domain: dict[str, tuple[float, float]]
    failures: dict[str, float]
    failed: str
    seconds: float


def standard_error(means: Sequence[float]) -> float:
    """Standard error of the mean of `means`, one per task; at least that of one task that differs from the others."""
    count = len(means)
    spread = float(np.std(means, ddof=1)) if count > 1 else 0.0
    return max(spread, 1.0 / count) / count**0.5


def summarise(rows: Sequence[Mapping[str, Any]], metric: str, seconds: float = 0.0) -> DesignScore:
    """Score of one model from its rows of EVALUATION_SCHEMA. Rewards are clipped to [0, 1]."""
    by_domain = {}
    for domain in sorted({row["domain"] for row in rows}):
        of_task: dict[str, list[float]] = {}
        for row in rows:
            if row["domain"] == domain:
                of_task.setdefault(row["task_id"], []).append(min(1.0, max(0.0, float(row[metric]))))
        means = [sum(values) / len(values) for values in of_task.values()]
        by_domain[domain] = round(sum(means) / len(means), DIGITS), round(standard_error(means), DIGITS)
    turns = sum(row["turns"] for row in rows) or 1
    refused = sum((1.0 - row["accepted"]) * row["turns"] for row in rows) / turns
    cut = sum(row["stop_reason"] != "terminated" for row in rows) / len(rows)
    score = sum(value for value, _ in by_domain.values()) / len(by_domain)
    error = sum(one**2 for _, one in by_domain.values()) ** 0.5 / len(by_domain)
    failures = {"refused": round(refused, DIGITS), "cut": round(cut, DIGITS)}
    return DesignScore(round(score, DIGITS), round(error, DIGITS), by_domain, failures, "", round(seconds, 1))


def _model_folder(model: str) -> str:
    return f"data/models/{model.replace('rl@', 'rl/')}"


@dataclass(frozen=True)
class DesignEvaluations:
    """The folder `.bellwether/design/<key>`."""

    folder: Path
    values: Mapping[str, Any]
    """params.yaml of the search, parsed."""
    params: SearchParams
    space: Space

    @classmethod
    def open(cls, root: Path, values: Mapping[str, Any], params: SearchParams, space: Space) -> DesignEvaluations:
        """Make the workspaces unless they exist, and update their code. Raises ParamsError, FileNotFoundError or ValueError for
        missing inputs."""
        opened = cls(root / FOLDER / workspace_key(root, params), values, params, space)
        workspaces = {split: EvaluationWorkspace(opened.folder / split) for split in SPLITS}
        if (opened.folder / PLAN).exists():
            for workspace in workspaces.values():
                workspace.update_code(root)
            return opened
        from stages.agent.policy import check_folder

        for model in sorted(set(space.options[0])):
            folder = params.model.path if model == "base" else _model_folder(model)
            if not folder.startswith("hub:"):
                check_folder(root / folder)
        shutil.rmtree(opened.folder, ignore_errors=True)
        chosen = {name: choose_tasks(root, name, params, opened.folder / "worlds" / name) for name in params.domains}
        for split, workspace in workspaces.items():
            fill_workspace(workspace, root, params, {name: (one, getattr(one, split)) for name, one in chosen.items()})
        domains = {
            name: {
                "description": describe(one.search, int(one.panel.environment["max_turns"])),
                **{split: [task.task_id for task in getattr(one, split)] for split in SPLITS},
                "panel": one.panel.hash,
            }
            for name, one in chosen.items()
        }
        shutil.rmtree(opened.folder / "worlds", ignore_errors=True)
        models = sorted({model for model in space.options[0] if model != "base"})
        hashes = {model: dvc_hash(root / _model_folder(model)) for model in models}
        write_json(opened.folder / PLAN, {"domains": domains, "models": hashes})  # last: the folder is complete with it
        return opened

    @cached_property
    def plan(self) -> dict[str, Any]:
        return read_json(self.folder / PLAN)

    def _workspace(self, kind: str) -> EvaluationWorkspace:
        return EvaluationWorkspace(self.folder / ("search" if kind == "search" else "confirm"))

    def _result(self, kind: str, design: Design) -> Path:
        return self.folder / "evaluations" / f"{kind}-{self.space.name(design)}.json"

    def result(self, kind: str, design: Design) -> DesignScore | None:
        """The stored result; None if the design was not evaluated."""
        path = self._result(kind, design)
        if not path.exists():
            return None
        saved = read_json(path)
        return DesignScore(**{**saved, "by_domain": {name: (one[0], one[1]) for name, one in saved["by_domain"].items()}})

    def rows(self, kind: str, design: Design) -> list[dict[str, Any]]:
        return read_rows(self._result(kind, design).with_suffix(".parquet"))

    def prepare(self, kind: str, design: Design) -> Path:
        """Write params.yaml of an evaluation; the folder in which `python -m stages.evaluate` then runs. `kind`: search | confirm
        | panel."""
        workspace = self._workspace(kind)
        for name in ("data/evaluation", "reports"):
            shutil.rmtree(workspace.folder / name, ignore_errors=True)
        evaluate: dict[str, Any] = {"split": "test"}
        if kind != "panel":
            evaluate = {"split": "valid", "attempts": self.params.design.attempts, "resamples": RESAMPLES}
        workspace.write_settings(deep_merge(deep_merge(self.values, {"evaluate": evaluate}), self.space.overrides(design)))
        return workspace.folder

    def collect(self, kind: str, design: Design, seconds: float, failed: str = "") -> DesignScore:
        """Store the result of the prepared evaluation, or why it `failed`. Raises FileNotFoundError if it did not run."""
        path, rows = self._result(kind, design), self._workspace(kind).folder / ROWS
        if failed:
            score = DesignScore(0.0, 0.0, dict.fromkeys(self.params.domains, (0.0, 0.0)), {}, failed, round(seconds, 1))
        else:
            if not rows.exists():
                raise FileNotFoundError(f"{rows} does not exist: 'python -m stages.evaluate' did not finish there")
            score = summarise(read_rows(rows), self.params.design.metric, seconds)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(rows, path.with_suffix(".parquet"))
        write_json(path, score.__dict__)
        return score
