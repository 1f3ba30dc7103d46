"""The browser that the other tests here look through."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from screenshots.chromium import PHONE, Browser

ROOT = Path(__file__).resolve().parents[2]


def page(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    path.write_text(f"<!DOCTYPE html><meta name=viewport content='width=device-width'><link rel=icon href='data:,'>{body}")
    return path


def test_it_sees_errors_sizes_and_colour_schemes(browser: Browser, tmp_path: Path) -> None:
    """Contract: an error on the console, or a load that fails, is reported; the network is out of reach."""
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


def test_without_a_browser_the_summary_says_what_was_left_out(tmp_path: Path) -> None:
    """Contract: `make test` without Chromium passes, names the tests it left out, and says how to get them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/browser", "-k", "test_it_sees"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "tests/browser/test_browser.py::test_it_sees_errors_sizes_and_colour_schemes" in done.stdout
    assert "apt-get install chromium chromium-driver" in done.stdout
