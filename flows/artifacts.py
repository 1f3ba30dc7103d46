"""What a run shows in Prefect's UI: a bar per long stage, what was done per stage, the results, links to report and MLflow.

Showing never stops a run: what a server refuses is said once and let go.
"""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.pages import REPORT_URL, mlflow_page
from flows.pipeline import Done

PROGRESS = Path(".bellwether") / "progress"
"""Where stages/runtime/progress.py keeps how far each stage is: one JSON file per stage at work."""
RESULTS = Path("reports") / "evaluation.csv"
REPORT = Path("reports") / "report.html"


def key(*parts: str) -> str:
    """An artifact's key: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


class Bars:
    """A progress artifact for each of one task's stages that reports progress, kept up to date by `update`."""

    def __init__(self, root: Path, stage: str, say: Callable[[str], None]) -> None:
        self.folder, self.stage, self.say = root / PROGRESS, stage, say
        self.started = time.time()
        self.shown: dict[str, tuple[Any, float]] = {}
        """Bar -> (id of its artifact, percent)."""
        self.broken = False

    def _read(self) -> dict[str, tuple[str, float]]:
        """Bar -> (what it says, percent), of stages that have reported since this task began."""
        found: dict[str, tuple[str, float]] = {}
        for path in [self.folder / f"{self.stage}.json", *sorted(self.folder.glob(f"{self.stage}@*.json"))]:
            try:
                if path.stat().st_mtime < self.started:
                    continue
                state = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue  # the stage has just ended
            said = f"{state['label']}: {state['done']} of {state['total']} {state['unit']}s when this bar was made"
            found[state["label"]] = (said, min(100.0, 100.0 * state["done"] / max(state["total"], 1)))
        return found

    def update(self) -> None:
        for label, (said, percent) in self._read().items():
            self._show(label, said, percent)

    def finish(self) -> None:
        """All stages are done: so are their bars."""
        for label in list(self.shown):
            self._show(label, "", 100.0)

    def _show(self, label: str, said: str, percent: float) -> None:
        identity, before = self.shown.get(label, (None, -1.0))
        if self.broken or percent == before:
            return
        try:
            if identity is None:
                identity = create_progress_artifact(progress=percent, key=key("progress", label), description=said)
            else:
                update_progress_artifact(identity, progress=percent)
            self.shown[label] = (identity, percent)
        except Exception as error:
            # Whatever the server or the network says, the stage goes on without its bar.
            self.broken = True
            self.say(f"progress of {self.stage} is not shown: {type(error).__name__}: {error}")


def show_stage(stage: str, done: Done, seconds: float) -> None:
    rows = [
        {"stage": name, "state": state}
        for state, names in (("ran", done.ran), ("restored from the run cache", done.restored), ("up to date", done.unchanged))
        for name in names
    ]
    create_table_artifact(rows, key=key("stage", stage), description=f"{stage}: {done} ({seconds:.1f} s)")


def show_run(root: Path, lifecycle: str, done: Mapping[str, tuple[Done, float]]) -> None:
    """The run's own artifacts; those for which there is nothing yet are left out."""
    rows = [
        {"stage": stage, "state": result.verdict, "what": str(result), "seconds": round(s, 1)}
        for stage, (result, s) in done.items()
    ]
    create_table_artifact(rows, key="stages", description="What each stage did")
    if (root / RESULTS).exists():
        with (root / RESULTS).open(encoding="utf-8", newline="") as handle:
            create_table_artifact(list(csv.DictReader(handle)), key="results", description="Success on the frozen panels")
    if (root / REPORT).exists():
        link = os.environ.get(REPORT_URL)
        if link:
            create_link_artifact(
                link, link_text="report.html", key="report", description="The report of this checkout's last run"
            )
        else:
            create_markdown_artifact(f"`{root / REPORT}`: open it in a browser.", key="report", description="The report")
    page = mlflow_page(lifecycle)
    if page:
        create_link_artifact(page, link_text="MLflow run", key="mlflow", description="Runs, curves and traces in MLflow")
