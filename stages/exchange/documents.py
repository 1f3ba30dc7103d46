"""Writes episodes in formats that are documents instead of rows: ATIF trajectories and logs of Inspect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.exchange.atif import trajectory
from stages.exchange.inspect_log import eval_log, log_bytes
from stages.records.episode import Episode
from stages.runtime.files import atomic_bytes, atomic_folder, atomic_text

ATIF, INSPECT = "atif", "inspect"
DOCUMENTS = {ATIF: (".jsonl", ""), INSPECT: (".eval", ".json")}
"""Format -> suffixes of what it can be written to; "" is a folder with a file per episode."""


def document_kinds() -> str:
    """What `write_documents` writes to, for the help."""
    return f"with --format {ATIF} .jsonl or a folder, with --format {INSPECT} .eval or .json"


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"


def write_documents(path: Path, form: str, episodes: Sequence[Episode], name: str) -> None:
    """Write `episodes` to `path`, whose suffix selects the layout; the same episodes always give the same bytes.

    name: who played. Raises ValueError for another suffix and without episodes.
    """
    if path.suffix not in DOCUMENTS[form]:
        raise ValueError(f"{path} does not fit --format {form}; write {document_kinds()}")
    if not episodes:
        raise ValueError("there are no episodes to export")
    if form == INSPECT:
        atomic_bytes(path, log_bytes(eval_log(episodes, name), packed=path.suffix == ".eval"))
    elif path.suffix:
        atomic_text(path, "".join(_json(trajectory(episode)) for episode in episodes))
    else:
        if path.exists() and not _only_trajectories(path):
            raise ValueError(f"{path} holds other files than trajectories; choose a new folder")
        with atomic_folder(path) as partial:
            for number, episode in enumerate(episodes):
                (partial / f"{number:05d}.json").write_text(_json(trajectory(episode), indent=1), encoding="utf-8")


def _only_trajectories(folder: Path) -> bool:
    return folder.is_dir() and all(item.suffix == ".json" and item.stem.isdecimal() for item in folder.iterdir())
