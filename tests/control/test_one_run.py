"""Programs of lane control end with a message in place of a traceback where a setting or a package is the cause."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.control import one_run
from stages.control.one_run import REFUSED, exit_code
from stages.control.reach import ravl
from stages.control.reach.settings import Reach
from stages.runtime.validation import ParamsError


def fails(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ParamsError("critics: must be at least 1"), 2),
        (ModuleNotFoundError("lane control needs Gymnasium; install it with pip install gymnasium"), 2),
        (OSError("no space left on device"), 1),
    ],
)
def test_errors_that_say_all_are_printed(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("control", fails(error)) == code
    assert capsys.readouterr().err == f"control: {error}\n"


def test_other_errors_keep_their_traceback() -> None:
    """Unless the caller refuses them, too."""
    with pytest.raises(ValueError, match="a fault of ours"):
        exit_code("control", fails(ValueError("a fault of ours")))
    assert exit_code("control", fails(ValueError("a value")), (*REFUSED, ValueError)) == 2
    assert exit_code("control", lambda: None) == 0


@pytest.mark.parametrize("module", ["stages.control.off_policy.training", "stages.control.exact.tabular"])
def test_a_missing_package_is_named(module: str, tmp_path: Path) -> None:
    """Contract: without Gymnasium a program of the lane exits with 2 and says how to install it."""
    settings, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    settings.write_text("{}\n")
    code = (
        "import runpy, sys\n"
        "sys.modules['gymnasium'] = None\n"
        f"sys.argv = ['{module}', '--settings', {str(settings)!r}, '--result', {str(result)!r}]\n"
        f"runpy.run_module('{module}', run_name='__main__')\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    assert found.stderr == "control: lane control needs Gymnasium; install it with pip install 'bellwether[gymnasium]'\n"
    assert not result.exists()


def test_figures_that_are_no_numbers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: a result holds finite numbers; else the run ends with which ones are not, and why."""
    monkeypatch.setattr(one_run, "die_with_parent", lambda: None)
    file, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    file.write_text("{}\n")
    monkeypatch.setattr(sys, "argv", ["x", "--settings", str(file), "--result", str(result)])
    found = {"return": float("nan"), "value": float("inf"), "steps": 3.0}
    assert one_run.one_run("control", "", Reach, lambda settings: found) == 2
    assert f"control: {file}: control.return is nan, control.value is inf, as numbers left the range" in capsys.readouterr().err
    assert not result.exists()


def test_a_file_that_is_no_yaml_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_run, "die_with_parent", lambda: None)
    file = tmp_path / "settings.yaml"
    file.write_text("critics: [1\n")
    monkeypatch.setattr(sys, "argv", ["ravl", "--settings", str(file), "--result", str(tmp_path / "result.json")])
    assert ravl.main() == 2
    assert f"control: {file} is not valid YAML: while parsing a flow sequence" in capsys.readouterr().err
