"""MLflow runs for stages that DVC did not execute because they were up to date or restored.

DVC starts no process for such a stage. When a later stage starts, it adds runs for those it depends on, read from dvc.lock.
A file per lifecycle in `.bellwether/tracking/lifecycles` lists the stages that already have a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from stages.runtime.lineage import Locked, came_before, locked_stages, stage_entry
from stages.tracking.header import Lifecycle
from stages.tracking.spool import FOLDER, Spool


def _record_file(lifecycle: Lifecycle) -> Path:
    return lifecycle.root / FOLDER / "lifecycles" / hashlib.sha256(lifecycle.key.encode()).hexdigest()[:16]


def recorded(lifecycle: Lifecycle) -> set[str]:
    """Titles of the stages for which this checkout has spooled a run in this lifecycle."""
    path = _record_file(lifecycle)
    return set(path.read_text(encoding="utf-8").split()) if path.exists() else set()


def record(lifecycle: Lifecycle, title: str) -> None:
    path = _record_file(lifecycle)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        handle.write(f"{title}\n")


def add_cached_runs(lifecycle: Lifecycle, stages: Iterable[Locked], states: Mapping[str, str]) -> list[str]:
    """Spool a finished run for each stage; `states` by title, default "cached". Returns the titles. Raises OSError."""
    titles = []
    for stage in stages:
        spool = Spool.create(lifecycle.root, lifecycle.header(stage.name, stage.domain, states.get(stage.title, "cached")))
        tags = {f"in:{path}": value for path, value in stage.inputs.items()}
        tags.update({f"out:{path}": value for path, value in stage.outputs.items()})
        spool.append({"kind": "tags", "values": tags})
        spool.append({"kind": "end", "status": "FINISHED"})
        record(lifecycle, stage.title)
        titles.append(stage.title)
    return titles


def add_upstream_runs(lifecycle: Lifecycle, root: Path, name: str, domain: str | None) -> list[str]:
    """Add runs for the stages upstream of a stage that DVC starts now, where this lifecycle has none."""
    stages = locked_stages(root, lifecycle.params.domains)
    before = came_before(stages, stage_entry(root, name, domain).get("deps", []))
    known = recorded(lifecycle)
    return add_cached_runs(lifecycle, [stage for stage in before if stage.title not in known], {})
