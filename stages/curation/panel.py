"""Frozen evaluation panels: the test tasks of a domain, named by a hash. Results of different panels are never compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.agent.episode import read_json, read_tasks, write_json
from stages.environments.protocol import Task


class PanelMismatchError(ValueError):
    """Results of different panels were about to be compared, or a panel's tasks are not those it was frozen with."""


@dataclass(frozen=True)
class Panel:
    """Test tasks in the order of their ids, and the environment settings under which they are played."""

    domain: str
    tasks: tuple[Task, ...]
    environment: Mapping[str, Any]

    @property
    def hash(self) -> str:
        return panel_hash(self.tasks)


def panel_hash(tasks: Sequence[Task]) -> str:
    """16 hex digits of the SHA-256 over the tasks' canonical JSON rows, sorted by task_id."""
    digest = hashlib.sha256()
    for task in sorted(tasks, key=lambda task: task.task_id):
        digest.update(json.dumps(asdict(task), sort_keys=True, ensure_ascii=True, allow_nan=False).encode() + b"\n")
    return digest.hexdigest()[:16]


def make_panel(domain: str, tasks: Sequence[Task], environment: Mapping[str, Any]) -> Panel:
    """The panel of the test tasks among `tasks`; `environment` are the domain's settings as plain JSON."""
    test = sorted((task for task in tasks if task.split == "test"), key=lambda task: task.task_id)
    # Through JSON, so that a panel just made equals the same panel read back (integer keys become strings).
    return Panel(domain, tuple(test), json.loads(json.dumps(environment)))


def write_panel(path: Path, panel: Panel) -> None:
    write_json(
        path,
        {
            "domain": panel.domain,
            "hash": panel.hash,
            "tasks": [task.task_id for task in panel.tasks],
            "environment": panel.environment,
        },
    )


def read_panel(folder: Path) -> Panel:
    """The panel of a curated folder (panel.json, tasks.parquet). Raises PanelMismatchError if its tasks were changed."""
    frozen = read_json(folder / "panel.json")
    panel = make_panel(frozen["domain"], read_tasks(folder / "tasks.parquet", "test"), frozen["environment"])
    if panel.hash != frozen["hash"]:
        raise PanelMismatchError(
            f"{folder}: the test tasks hash to {panel.hash}, but panel.json was frozen with {frozen['hash']}; "
            "run the curate stage again and evaluate every model anew"
        )
    return panel


def require_same_panel(a: Panel, b: Panel) -> None:
    """Raise PanelMismatchError, saying what differs, unless `a` and `b` are the same tasks in the same environment."""
    if a.domain != b.domain:
        raise PanelMismatchError(f"panels of different domains can't be compared: {a.domain} and {b.domain}")
    require_same_hash({"first": a.hash, "second": b.hash}, a.domain)
    changed = sorted(key for key in {*a.environment, *b.environment} if a.environment.get(key) != b.environment.get(key))
    if changed:
        raise PanelMismatchError(
            f"the {a.domain} panels were played with different environment settings ({', '.join(changed)}); "
            "evaluate both models with the same ones"
        )


def require_same_hash(hashes: Mapping[str, str], domain: str) -> None:
    """Raise PanelMismatchError unless all results (name -> panel hash) come from one panel."""
    if len(set(hashes.values())) > 1:
        given = ", ".join(f"{name}: {value}" for name, value in sorted(hashes.items()))
        raise PanelMismatchError(
            f"results on different panels of domain {domain} can't be compared ({given}); evaluate all models on one panel"
        )
