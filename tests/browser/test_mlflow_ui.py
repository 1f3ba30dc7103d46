"""MLflow's own UI, over runs as the stages send them: parent, children, an episode as a trace."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from mlflow_server import serving
from spooling import EPISODE, runs, spooled

from stages.tracking.episodes import trace_of
from stages.tracking.sender import Sender
from stages.tracking.server import Server


@pytest.fixture
def tracked(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A store with one lifecycle: sft, and rl@search with a curve and a trace."""
    for name in ("MLFLOW_TRACKING_URI", "DVC_ROOT", "LIFECYCLE_RUN_ID", "DVC_EXP_NAME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mlflow.db").write_bytes(empty_database.read_bytes())
    server = Server(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for stage, domain in (("sft", None), ("rl", "search")):
        spool = spooled(tmp_path, stage, domain)
        for step in range(5):
            spool.append({"kind": "metric", "name": "success", "value": step / 5, "step": step})
        if domain:
            spool.append({"kind": "trace", **trace_of(EPISODE)})
        spool.append({"kind": "end", "status": "FINISHED"})
        assert Sender(server, spool).send()
    return server


def shows(browser: Any, address: str, *texts: str, within_s: float = 120.0) -> str:
    """Open a page and wait until all texts are on it; its text."""
    browser.open("about:blank")
    browser.open(address)
    deadline = time.monotonic() + within_s
    while True:
        text = str(browser.run("return document.body.innerText"))
        lacking = [item for item in texts if item not in text]
        if not lacking:
            return text
        assert time.monotonic() < deadline, f"{address} does not show {lacking}:\n{text[:2000]}"
        time.sleep(0.5)


def test_parent_children_and_a_trace_are_there_to_be_seen(browser: Any, tracked: Server) -> None:
    browser.forgiven = "."  # what MLflow's own page says on the console is not ours
    found = runs(tracked)
    parent, child = found["lifecycle"], found["rl@search"]
    trace = tracked.client.search_traces(locations=[tracked.experiment])[0]
    with serving(tracked.root) as server:
        start = f"{server.url}/#/experiments/{tracked.experiment}"
        listed = shows(browser, f"{start}/runs", parent.info.run_name, "sft", "rl@search")
        # Children stand below the parent that can be folded.
        assert listed.index(parent.info.run_name) < min(listed.index("sft"), listed.index("rl@search"))
        shows(browser, f"{start}/runs/{child.info.run_id}", "rl@search", "success", "Parent run", parent.info.run_name)
        page = shows(
            browser,
            f"{start}/traces?selectedEvaluationId={trace.info.trace_id}",
            "turn 1: go",
            "turn 2: take",
            "turn 2: environment",
        )
        assert "reward" in page
        assert "take it" in page
