"""Findings about another package's code name its file and line, and say no more than is wrong."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from stages.runtime.checking import Findings, run_checks
from stages.runtime.entry_points import place
from stages.runtime.validation import ParamsError


@pytest.fixture
def plugin(tmp_path: Path) -> Any:
    """A module with a function, on line 4, whose error a library raises on behalf of line 5."""
    (tmp_path / "plugin.py").write_text("import json\n\n\ndef broken(*given):\n    return json.loads('{')\n")
    spec = spec_from_file_location("plugin", tmp_path / "plugin.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_error_is_placed_in_the_package_that_led_to_it(plugin: Any) -> None:
    found = Findings()
    found.check("reads", plugin.broken, plugin.broken)
    (mistake,) = found.mistakes
    assert mistake.startswith(f"{plugin.__file__}:4: reads: it raised JSONDecodeError: ")
    assert mistake.endswith(f"({plugin.__file__}:5)")


def test_a_wrapper_is_placed_at_what_it_wraps(plugin: Any) -> None:
    def wrapper(function: Callable[..., Any], folder: str) -> Any:
        return function(folder)

    assert place(functools.partial(wrapper, plugin.broken)) == place(plugin.broken) == f"{plugin.__file__}:4"
    assert place(functools.partial(plugin.broken, "folder")) == place(plugin.broken)


def test_a_message_for_people_is_all_that_is_said(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: an unknown name is the command line's, not that of params.yaml."""

    def refuse(*given: Any) -> None:
        raise ParamsError("params.yaml: unknown domain 'mase'")

    found = Findings()
    found.check("loads", plugin.broken, refuse)
    assert found.mistakes == [f"{plugin.__file__}:4: loads: params.yaml: unknown domain 'mase'"]
    monkeypatch.setattr(sys, "argv", ["environments", "check", "mase"])
    assert run_checks("environment", refuse)() == 2
    assert capsys.readouterr().out == "unknown domain 'mase'\n"
