"""Frozen evaluation panels: a domain's test tasks with their environment settings and worlds, identified by a hash. Results of
different panels are never compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.environments.protocol import Domain
from stages.records.episode import read_json, read_tasks, write_json
from stages.records.task import Split, Task


class PanelMismatchError(ValueError):
    """Results of different panels would be compared, or a panel's tasks or worlds changed after it was frozen."""


@dataclass(frozen=True)
class Panel:
    """Test tasks in the order of their ids, with their environment settings and worlds."""

    domain: str
    tasks: tuple[Task, ...]
    environment: Mapping[str, Any]
    worlds: Mapping[str, str]
    """SHA-256 of each world file, by its path below the folder of worlds."""

    @property
    def hash(self) -> str:
        """16 hex digits of the SHA-256 over canonical JSON rows: settings, worlds, then the tasks sorted by task_id."""
        digest = hashlib.sha256()
        tasks = sorted(self.tasks, key=lambda task: task.task_id)
        for row in (self.environment, self.worlds, *map(asdict, tasks)):
            digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True, allow_nan=False).encode() + b"\n")
        return digest.hexdigest()[:16]


def _world_files(domain: Domain, tasks: Sequence[Task], worlds: Path) -> list[str]:
    """Files below `worlds` that `tasks` use, sorted: the domain's `world_files`, or all files."""
    files_of = getattr(domain, "world_files", None)
    if files_of is None:
        return sorted(path.relative_to(worlds).as_posix() for path in worlds.rglob("*") if path.is_file())
    return sorted({file for task in tasks for file in files_of(task)})


def make_panel(domain: Domain, tasks: Sequence[Task], worlds: Path, split: Split = "test") -> Panel:
    """The panel of the tasks of `split`, which `domain` has built below the folder `worlds`."""
    test = sorted((task for task in tasks if task.split == split), key=lambda task: task.task_id)
    # Through JSON, so that a new panel equals the same panel read back (integer keys become strings).
    environment = json.loads(json.dumps(domain.settings.model_dump(mode="json")))
    files = {file: _digest(worlds / file) for file in _world_files(domain, test, worlds)}
    return Panel(domain.name, tuple(test), environment, files)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_panel(path: Path, panel: Panel) -> None:
    write_json(
        path,
        {
            "domain": panel.domain,
            "hash": panel.hash,
            "tasks": [task.task_id for task in panel.tasks],
            "environment": panel.environment,
            "worlds": panel.worlds,
        },
    )


def read_panel(folder: Path) -> Panel:
    """The panel of a curated folder (panel.json, tasks.parquet, worlds).

    Raises PanelMismatchError if its tasks, settings or worlds changed after it was frozen.
    """
    frozen, again = read_json(folder / "panel.json"), "run the curate stage again and re-evaluate every model"
    tasks, worlds = read_tasks(folder / "tasks.parquet", "test"), frozen.get("worlds", {})
    paths = {file: folder / "worlds" / file for file in worlds}
    changed = sorted(file for file, path in paths.items() if not path.is_file() or _digest(path) != worlds[file])
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise PanelMismatchError(
            f"{folder / 'worlds'}: {', '.join(changed[:3])}{more} missing or changed since panel.json was frozen; {again}"
        )
    panel = Panel(frozen["domain"], tuple(sorted(tasks, key=lambda task: task.task_id)), frozen["environment"], worlds)
    if panel.hash != frozen["hash"]:
        raise PanelMismatchError(
            f"{folder}: test tasks and settings hash to {panel.hash}, but panel.json was frozen with {frozen['hash']}; {again}"
        )
    return panel


def require_same_hash(hashes: Mapping[str, str], domain: str) -> None:
    """Raise PanelMismatchError unless all results (name -> panel hash) come from one panel."""
    if len(set(hashes.values())) > 1:
        given = ", ".join(f"{name}: {value}" for name, value in sorted(hashes.items()))
        raise PanelMismatchError(
            f"results on different panels of domain {domain} can't be compared ({given}); evaluate all models on one panel"
        )
