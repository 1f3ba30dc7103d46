"""Artifacts of a run in Prefect's UI: a progress bar per long stage, a table per stage, the results, links to report and MLflow.

A server that rejects an artifact never stops a run: the error is logged once.
"""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Mapping
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
from flows.pipeline import StageResult
from flows.process import Echo

PROGRESS = Path(".bellwether") / "progress"
"""Where stages/runtime/progress.py writes the progress of each running stage, one JSON file each."""
RESULTS = Path("reports") / "evaluation.csv"
REPORT = Path("reports") / "report.html"


def key(*parts: str) -> str:
    """An artifact's key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


class ProgressBars:
    """Progress artifacts of an item, one for each label under which it reports; `update` refreshes them."""

    def __init__(self, root: Path, item: str, log: Echo) -> None:
        self.file, self.item, self.log = root / PROGRESS / f"{item}.json", item, log
        self.started = time.time()
        self.shown: dict[str, tuple[Any, float]] = {}
        """Label -> (id of its artifact, percent)."""
        self.broken = False

    def _read(self) -> dict[str, tuple[str, float]]:
        """Label -> (description, percent), if the item has reported since this task began."""
        try:
            if self.file.stat().st_mtime < self.started:
                return {}
            state = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # the stage has just ended and removed it
        description = f"{state['label']}: {state['done']} of {state['total']} {state['unit']}s when this bar was created"
        return {state["label"]: (description, min(100.0, 100.0 * state["done"] / max(state["total"], 1)))}

    def update(self) -> None:
        for label, (description, percent) in self._read().items():
            self._show(label, description, percent)

    def finish(self) -> None:
        """Set all bars to 100 percent."""
        for label in list(self.shown):
            self._show(label, "", 100.0)

    def _show(self, label: str, description: str, percent: float) -> None:
        identity, before = self.shown.get(label, (None, -1.0))
        if self.broken or percent == before:
            return
        try:
            if identity is None:
                identity = create_progress_artifact(progress=percent, key=key("progress", label), description=description)
            else:
                update_progress_artifact(identity, progress=percent)
            self.shown[label] = (identity, percent)
        except Exception as error:
            self.broken = True
            self.log(f"progress of {self.item} is not shown: {type(error).__name__}: {error}")


def show_stage(stage: str, result: StageResult, seconds: float) -> None:
    rows = [
        {"stage": name, "state": state}
        for state, names in (
            ("ran", result.ran),
            ("restored from the run cache", result.restored),
            ("up to date", result.unchanged),
        )
        for name in names
    ]
    create_table_artifact(rows, key=key("stage", stage), description=f"{stage}: {result} ({seconds:.1f} s)")


def show_run(root: Path, lifecycle: str, done: Mapping[str, tuple[StageResult, float]]) -> None:
    """The run's own artifacts, those whose files exist."""
    rows = [
        {"stage": stage, "state": result.state, "what": str(result), "seconds": round(seconds, 1)}
        for stage, (result, seconds) in done.items()
    ]
    create_table_artifact(rows, key="stages", description="Result per stage")
    if (root / RESULTS).exists():
        with (root / RESULTS).open(encoding="utf-8", newline="") as handle:
            create_table_artifact(list(csv.DictReader(handle)), key="results", description="Success of each model")
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
