"""Where designs are evaluated: copies of the checkout in which the ordinary stage `evaluate` plays.

`.bellwether/design/<key>`, the key a hash of what an evaluation depends on (models, tasks, code, settings), holds two places,
`search` and `confirm`, that differ in their validation tasks, and every evaluation that was made there, by design: whatever is
searched later, and however, is not played again.
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
import yaml

from stages.designs.settings import SearchParams
from stages.designs.space import Design, Space
from stages.designs.tasks import Chosen, choose_tasks
from stages.designs.value_model import describe
from stages.records.episode import read_json, read_rows, write_json, write_tasks
from stages.records.sections import deep_merge, params_hash
from stages.records.task import Task
from stages.runtime.files import atomic_text
from stages.runtime.lineage import dvc_hash, identity, input_hashes

FOLDER = Path(".bellwether") / "design"
PLACES = ("search", "confirm")
PLAN, PARAMS = "plan.json", "params.yaml"
ROWS = Path("data/evaluation/rows.parquet")
RESAMPLES = 100
"""Of intervals that nobody reads."""
DIGITS = 6


def place_key(root: Path, params: SearchParams) -> str:
    """16 hex digits over what the scores of designs depend on: files, as dvc.yaml lists them for evaluate, and settings."""
    played = params.model_dump(mode="json", include={"seed", "domains", "model", "evaluate"})
    scored = params.design.model_dump(mode="json", include={"tasks", "attempts", "metric"})
    files = identity(input_hashes(root, "evaluate", None))
    return params_hash({**played, "design": scored, "confirm": params.design.confirm.tasks, "files": files})


def _link(source: str, target: str) -> None:
    """Stages write whole new files, so that a second name of one stays as it is; across file systems it is copied. What is there
    already, under a name that stands for its contents, stays."""
    if os.path.exists(target):
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def link_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def bring_code(root: Path, target: Path) -> None:
    """Let the place `target` have the code of the checkout `root`. What changes no score is not in `place_key`, but a copy of it
    that is older than params.yaml could refuse that."""

    def files(folder: Path) -> dict[Path, bytes]:
        return {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    if files(target / "stages") != files(root / "stages"):
        shutil.rmtree(target / "stages", ignore_errors=True)
        shutil.copytree(root / "stages", target / "stages", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(root / "dvc.yaml", target / "dvc.yaml")


def make_place(root: Path, target: Path, params: SearchParams, tasks: Mapping[str, tuple[Chosen, Sequence[Task]]]) -> None:
    """The copy `target` of the checkout, with code, models and panels, whose validation tasks are `tasks` (domain -> what was
    chosen, and which of it)."""
    bring_code(root, target)
    for name in {"data/models", params.model.path if not params.model.path.startswith("hub:") else "data/models"}:
        link_tree(root / name, target / name)
    for name, (chosen, which) in tasks.items():
        curated, folder = root / "data" / "curated" / name, target / "data" / "curated" / name
        link_tree(curated / "worlds", folder / "worlds")
        link_tree(chosen.worlds, folder / "worlds")
        shutil.copy2(curated / "panel.json", folder / "panel.json")
        write_tasks(folder / "tasks.parquet", [*chosen.panel.tasks, *which])


@dataclass(frozen=True)
class Evaluated:
    """What one design scored: by domain and in the mean, each with a standard error."""

    score: float
    error: float
    by_domain: dict[str, tuple[float, float]]
    failures: dict[str, float]
    failed: str
    seconds: float


def standard_error(means: Sequence[float]) -> float:
    """Of the mean of so many tasks' means; where they are all equal, that of one more task that differs."""
    count = len(means)
    spread = float(np.std(means, ddof=1)) if count > 1 else 0.0
    return max(spread, 1.0 / count) / count**0.5


def summarise(rows: Sequence[Mapping[str, Any]], metric: str, seconds: float = 0.0) -> Evaluated:
    """Rows of EVALUATION_SCHEMA of one model. Rewards count as far as they lie in [0, 1]."""
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
    return Evaluated(round(score, DIGITS), round(error, DIGITS), by_domain, failures, "", round(seconds, 1))


@dataclass(frozen=True)
class Places:
    """The folder `.bellwether/design/<key>`."""

    folder: Path
    values: Mapping[str, Any]
    """params.yaml of the search, parsed."""
    params: SearchParams
    space: Space

    @classmethod
    def prepared(cls, root: Path, values: Mapping[str, Any], params: SearchParams, space: Space) -> Places:
        """Make the places unless they are there, with the present code in any case. Raises ParamsError, FileNotFoundError,
        ValueError for what is missing."""
        made = cls(root / FOLDER / place_key(root, params), values, params, space)
        if (made.folder / PLAN).exists():
            for place in PLACES:
                bring_code(root, made.folder / place)
            return made
        from stages.agent.policy import check_folder

        for model in sorted(set(space.options[0])):
            folder = params.model.path if model == "base" else f"data/models/{model.replace('rl@', 'rl/')}"
            if not folder.startswith("hub:"):
                check_folder(root / folder)
        shutil.rmtree(made.folder, ignore_errors=True)
        chosen = {name: choose_tasks(root, name, params, made.folder / "worlds" / name) for name in params.domains}
        for place in PLACES:
            tasks = {name: (one, getattr(one, place)) for name, one in chosen.items()}
            make_place(root, made.folder / place, params, tasks)
        domains = {
            name: {
                "description": describe(one.search, int(one.panel.environment["max_turns"])),
                **{place: [task.task_id for task in getattr(one, place)] for place in PLACES},
                "panel": one.panel.hash,
            }
            for name, one in chosen.items()
        }
        shutil.rmtree(made.folder / "worlds", ignore_errors=True)
        models = sorted({model for model in space.options[0] if model != "base"})
        hashes = {model: dvc_hash(root / f"data/models/{model.replace('rl@', 'rl/')}") for model in models}
        write_json(made.folder / PLAN, {"domains": domains, "models": hashes})
        return made

    @cached_property
    def plan(self) -> dict[str, Any]:
        return read_json(self.folder / PLAN)

    def _result(self, kind: str, design: Design) -> Path:
        return self.folder / "evaluations" / f"{kind}-{self.space.name(design)}.json"

    def result(self, kind: str, design: Design) -> Evaluated | None:
        """What was found before; None if this was never played."""
        path = self._result(kind, design)
        if not path.exists():
            return None
        saved = read_json(path)
        return Evaluated(**{**saved, "by_domain": {name: (one[0], one[1]) for name, one in saved["by_domain"].items()}})

    def rows(self, kind: str, design: Design) -> list[dict[str, Any]]:
        return read_rows(self._result(kind, design).with_suffix(".parquet"))

    def lay_out(self, kind: str, design: Design) -> Path:
        """Ready to play: the place in which `python -m stages.evaluate` is to run. `kind`: search | confirm | panel."""
        place = self.folder / ("search" if kind == "search" else "confirm")
        for name in ("data/evaluation", "reports"):
            shutil.rmtree(place / name, ignore_errors=True)
        played: dict[str, Any] = {"split": "test"}
        if kind != "panel":
            played = {"split": "valid", "attempts": self.params.design.attempts, "resamples": RESAMPLES}
        values = deep_merge(deep_merge(self.values, {"evaluate": played}), self.space.overrides(design))
        atomic_text(place / PARAMS, yaml.safe_dump(dict(values), sort_keys=False))
        return place

    def collect(self, kind: str, design: Design, seconds: float, failed: str = "") -> Evaluated:
        """Take up what was played in `lay_out`'s place, or that it failed. Raises FileNotFoundError if it was not played."""
        path, place = self._result(kind, design), self.folder / ("search" if kind == "search" else "confirm")
        if failed:
            found = Evaluated(0.0, 0.0, dict.fromkeys(self.params.domains, (0.0, 0.0)), {}, failed, round(seconds, 1))
        else:
            if not (place / ROWS).exists():
                raise FileNotFoundError(
                    f"{place / ROWS} does not exist: 'python -m stages.evaluate' has not run there to its end"
                )
            found = summarise(read_rows(place / ROWS), self.params.design.metric, seconds)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(place / ROWS, path.with_suffix(".parquet"))
        write_json(path, found.__dict__)
        return found
