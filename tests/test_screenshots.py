"""Servers started for screenshots: ended after use, and reported if they do not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from screenshots.servers import HOST, answers, free_port, serving
from stages.params import ROOT


def test_server_answers_inside_the_context_and_ends_after_it(tmp_path: Path) -> None:
    port = free_port()
    address = f"http://{HOST}:{port}/"
    command = [sys.executable, "-m", "http.server", str(port), "--bind", HOST, "--directory", str(tmp_path)]
    with serving(command, address, tmp_path / "log", {}, ROOT):
        assert answers(address)
    assert not answers(address)


def test_server_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such store'); raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match=r"does not respond at http://127\.0\.0\.1:9/; the end of .*log:\nno such store"),
        serving(command, f"http://{HOST}:9/", tmp_path / "log", {}, ROOT),
    ):
        raise AssertionError("the body must not run")
