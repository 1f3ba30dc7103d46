"""The browser fixture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from screenshots.chromium import PHONE, Browser

ROOT = Path(__file__).resolve().parents[2]


def page(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    path.write_text(f"<!DOCTYPE html><meta name=viewport content='width=device-width'><link rel=icon href='data:,'>{body}")
    return path


def test_browser_reports_errors_and_sets_size_and_colour_scheme(browser: Browser, tmp_path: Path) -> None:
    """Contract: a console error and a failed load are reported; the network is unreachable."""
    browser.open(
        page(tmp_path, "<script>console.error('broken'); console.warn('fine')</script><img src='http://example.org/x.png'>")
    )
    errors = browser.errors()
    assert [kind for kind in ("broken", "ERR_PROXY_CONNECTION_FAILED") if any(kind in error for error in errors)] == [
        "broken",
        "ERR_PROXY_CONNECTION_FAILED",
    ]
    assert len(errors) == 2
    browser.ignored = "broken|ERR_PROXY"
    assert browser.errors() == []
    browser.view(PHONE, dark=True)
    assert browser.run("return innerWidth") == PHONE[0]
    assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches")


@pytest.mark.slow
def test_summary_names_the_tests_skipped_without_a_browser(tmp_path: Path) -> None:
    """Contract: `make test` without Chromium passes, names the skipped tests and says how to install it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/browser", "-k", "test_browser_reports"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "tests/browser/test_browser.py::test_browser_reports_errors_and_sets_size_and_colour_scheme" in done.stdout
    assert "apt-get install chromium chromium-driver" in done.stdout
