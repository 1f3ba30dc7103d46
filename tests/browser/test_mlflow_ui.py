"""MLflow's UI with runs as the stages send them: parent, children, an episode as a trace."""

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

EXPANDER = '[data-component-id*="runnamecellrenderer"]'
"""The arrow in front of a parent run in the list of runs."""


@pytest.fixture
def tracked(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A store with one lifecycle: sft, and rl@search with a curve and a trace."""
    for name in ("MLFLOW_TRACKING_URI", "DVC_ROOT", "LIFECYCLE_RUN_ID", "DVC_EXP_NAME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mlflow.db").write_bytes(empty_database.read_bytes())
    server = Server(tmp_path)
    for stage, domain in (("sft", None), ("rl", "search")):
        spool = spooled(tmp_path, stage, domain)
        for step in range(5):
            spool.append({"kind": "metric", "name": "success", "value": step / 5, "step": step})
        if domain:
            spool.append({"kind": "trace", **trace_of(EPISODE, "rl step 1")})
        spool.append({"kind": "end", "status": "FINISHED"})
        assert Sender(server, spool).send()
    return server


def shows(browser: Any, *texts: str, within_s: float = 240.0) -> str:
    """Wait until all texts are on the page; its text."""
    deadline = time.monotonic() + within_s
    while True:
        text = str(browser.run("return document.body.innerText"))
        missing = [item for item in texts if item not in text]
        if not missing:
            return text
        assert time.monotonic() < deadline, f"the page does not show {missing}:\n{text[:2000]}"
        time.sleep(0.2)


def opened(browser: Any, address: str, *texts: str) -> str:
    browser.open("about:blank")  # otherwise a URL that differs only in its fragment would not be reloaded
    browser.open(address)
    return shows(browser, *texts)


def test_ui_shows_parent_children_and_a_trace(browser: Any, tracked: Server) -> None:
    browser.ignored = "."  # MLflow's own page logs to the console
    found = runs(tracked)
    parent, child = found["lifecycle"], found["rl@search"]
    trace = tracked.client.search_traces(locations=[tracked.experiment])[0]
    with serving(tracked.root) as server:
        start = f"{server.url}/#/experiments/{tracked.experiment}"
        opened(browser, f"{start}/runs", parent.info.run_name)
        browser.run(f"document.querySelector('{EXPANDER}').click()")
        listed = shows(browser, "sft", "rl@search")
        assert listed.index(parent.info.run_name) < min(listed.index("sft"), listed.index("rl@search"))
        opened(browser, f"{start}/runs/{child.info.run_id}", "rl@search", "success", "Parent run", parent.info.run_name)
        turns = ("turn 1: go", "turn 2: take", "turn 2: environment")
        assessments = ("reward", "format")  # they come by a request of their own, after the turns
        opened(browser, f"{start}/traces?selectedEvaluationId={trace.info.trace_id}", *turns, "take it", *assessments)
