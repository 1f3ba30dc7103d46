"""Tests in a real browser. Without Chromium and its driver they are skipped, and the summary says so and how to install them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from screenshots.chromium import HOW_TO_GET, Browser, lacking, open_browser
from stages.runtime.files import locked

HERE = Path(__file__).parent
REASON = "no browser: "


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = lacking()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if missing:
                item.add_marker(pytest.mark.skip(reason=REASON + missing))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if REASON in str(report.longrepr)]
    if skipped:
        terminalreporter.section("skipped: tests in a real browser", yellow=True)
        for report in skipped:
            terminalreporter.write_line(report.nodeid)
        terminalreporter.write_line(f"{lacking()}. On Debian and Ubuntu: {HOW_TO_GET}; then 'pytest tests/browser' runs them.")


@pytest.fixture(scope="session")
def _chromium() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def browser(_chromium: Browser) -> Iterator[Browser]:
    """A browser with a new tab, 1280 pixels wide, light, in a process that tests share: starting one takes seconds. Fails the
    test at its end if the console holds an error that `browser.ignored` does not match."""
    _chromium.renew()
    yield _chromium
    assert _chromium.errors() == []


@pytest.fixture
def own_browser() -> Iterator[Browser]:
    """As `browser`, in a process of its own, which knows no passwords."""
    with open_browser() as opened:
        opened.view()
        yield opened
        assert opened.errors() == []


@pytest.fixture(scope="session")
def report(shared: Path) -> Path:
    """The page of a generated run, made by the first worker that needs it; do not change it."""
    from reporting_run import add_value_model, make_run

    from stages.report import run
    from stages.runtime.stage import StageContext
    from stages.runtime.tracker import Tracker

    root, made = shared / "report", shared / "report.made"
    with locked(shared / "report.lock", wait=True):
        if not made.exists():
            shutil.rmtree(root, ignore_errors=True)  # left by a worker that failed
            root.mkdir()
            params = make_run(root)
            add_value_model(root, "search")
            run(StageContext("report", None, params, root, Tracker()))
            made.touch()
    return root / "reports" / "report.html"


@pytest.fixture(scope="session")
def viewer(report: Path) -> Path:
    return report.parent / "episodes" / "index.html"


@pytest.fixture(scope="session")
def index(viewer: Path) -> dict[str, Any]:
    found = re.search(r'id="index">(.*?)</script>', viewer.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])
