"""Runs for stages that were not executed: what DVC found up to date or restored has a child in MLflow too.

DVC starts no process for such a stage, so who comes after says it: a stage that starts knows from dvc.lock what it came after.
Which stages a lifecycle has runs of already is kept in a file per lifecycle, below `.bellwether/tracking/lifecycles`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from stages.runtime.lineage import Locked, came_before, locked_stages, stage_entry
from stages.tracking.header import Lifecycle
from stages.tracking.spool import FOLDER, Spool


def _noted(lifecycle: Lifecycle) -> Path:
    return lifecycle.root / FOLDER / "lifecycles" / hashlib.sha256(lifecycle.key.encode()).hexdigest()[:16]


def noted(lifecycle: Lifecycle) -> set[str]:
    """Titles of the stages that this checkout has told of in this lifecycle."""
    path = _noted(lifecycle)
    return set(path.read_text(encoding="utf-8").split()) if path.exists() else set()


def note(lifecycle: Lifecycle, title: str) -> None:
    path = _noted(lifecycle)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        handle.write(f"{title}\n")


def tell(lifecycle: Lifecycle, stages: Iterable[Locked], states: Mapping[str, str]) -> list[str]:
    """Spool a finished run for each stage; `states` by title, "cached" where not given. Returns the titles. Raises OSError."""
    told = []
    for stage in stages:
        spool = Spool.create(lifecycle.root, lifecycle.header(stage.name, stage.domain, states.get(stage.title, "cached")))
        tags = {f"in:{path}": value for path, value in stage.inputs.items()}
        tags.update({f"out:{path}": value for path, value in stage.outputs.items()})
        spool.append({"kind": "tags", "values": tags})
        spool.append({"kind": "end", "status": "FINISHED"})
        note(lifecycle, stage.title)
        told.append(stage.title)
    return told


def tell_what_came_before(lifecycle: Lifecycle, root: Path, name: str, domain: str | None) -> list[str]:
    """Called when a stage starts, by DVC and thus after all it depends on: tell of those that this lifecycle has no run of."""
    stages = locked_stages(root, lifecycle.params.domains)
    before = came_before(stages, stage_entry(root, name, domain).get("deps", []))
    known = noted(lifecycle)
    return tell(lifecycle, [stage for stage in before if stage.title not in known], {})
