"""Inspect's own viewer shows an exported log."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from exported_episodes import OPENING, varied
from outside_viewers import lacking, viewers

from screenshots.servers import HOST, free_port, serving
from stages.exchange.documents import write_documents
from stages.params import ROOT

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


def missing(browser: Any, *texts: str, within_s: float = 120.0) -> list[str]:
    """Those of the texts that the page does not show in this time."""
    deadline = time.monotonic() + within_s
    while True:
        shown = str(browser.run("return document.body.innerText")).lower()
        lacking = [text for text in texts if text.lower() not in shown]
        if not lacking or time.monotonic() > deadline:
            return lacking
        time.sleep(0.2)


def test_inspect_view_shows_samples_scores_and_messages(browser: Any, tmp_path: Path) -> None:
    browser.ignored = "."  # Inspect's own page logs to the console
    (tmp_path / "logs").mkdir()
    write_documents(tmp_path / "logs" / "exported.eval", "inspect", varied(tmp_path / "episodes.parquet"), "merged")
    address = f"http://{HOST}:{(port := free_port())}/"
    command = [str(viewers() / "bin" / "inspect"), "view", "start", "--log-dir", str(tmp_path / "logs")]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    with serving([*command, "--host", HOST, "--port", str(port)], address, tmp_path / "log", environment, ROOT):
        browser.open(f"{address}#/logs/exported.eval")
        assert missing(browser, "textworld", "merged", "t1", "t3") == []
        browser.open("about:blank")
        browser.open(f"{address}#/logs/exported.eval/samples/sample/t1/1/messages")
        assert missing(browser, OPENING, "go east", "A lamp.", "take lamp") == []
        browser.open("about:blank")
        browser.open(f"{address}#/logs/exported.eval/samples/sample/t1/1/scoring")
        assert missing(browser, "success", "reward", "format") == []
