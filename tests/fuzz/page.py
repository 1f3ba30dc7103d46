"""docs/guarantees.md: its table of counts comes from docs/guarantees.json, which `python -m tests.fuzz SUITE --write` fills."""

from __future__ import annotations

import json
from typing import Any

from stages.params import ROOT
from stages.reporting.generated_blocks import replace_block

from .outcomes import Tally

FIGURES = ROOT / "docs" / "guarantees.json"
PAGE = ROOT / "docs" / "guarantees.md"
WHAT = {
    "params": "params.yaml: values, keys, bytes, overlays",
    "records": "raw records, games, problems of code_folder",
    "imports": "files of curate.imports",
    "requests": "requests to the agent's server",
    "kills": "SIGKILL at a random moment of a stage, then a restart",
}


def figures() -> dict[str, Any]:
    return json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}


def store(tally: Tally, command: str) -> None:
    """Store the counts of a run in docs/guarantees.json, and update the page."""
    kept = {**figures(), tally.suite: {"command": command, **tally.row()}}
    FIGURES.write_text(json.dumps({name: kept[name] for name in WHAT if name in kept}, indent=1) + "\n", encoding="utf-8")
    write()


def table() -> str:
    """The counts as Markdown."""
    rows = ["| input | tried | refused clearly | accepted and working | lost | command |", "|---|---|---|---|---|---|"]
    for name, row in figures().items():
        numbers = " | ".join(f"{row[kind]:,}" for kind in ("tried", "refused", "accepted", "lost"))
        rows.append(f"| {WHAT[name]} | {numbers} | `{row['command']}` |")
    return "\n".join(rows)


def page() -> str:
    """The page with the counts of docs/guarantees.json."""
    return replace_block(PAGE.read_text(encoding="utf-8"), "fuzz", table())


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")
