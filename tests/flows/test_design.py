"""The design search as a flow: its calls of the command line, failed evaluations, and its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

import flows  # noqa: F401  (configures Prefect, so it comes before Prefect's import)
from flows import design as module
from flows.design import DesignSearch, evaluate, next_step
from flows.process import BAD_PARAMETERS, StageFailedError, python_environment, run_supervised

DESIGN = """
import json, pathlib, sys
workspace = pathlib.Path("workspace")
workspace.mkdir(exist_ok=True)
calls = pathlib.Path("calls")
earlier = calls.read_text().splitlines() if calls.exists() else []
calls.write_text("".join(line + chr(10) for line in [*earlier, json.dumps(sys.argv[1:])]))
if "design.budgets=1" in sys.argv:
    print("design: params.yaml with --set: unknown key 'design.budgets'", file=sys.stderr)
    sys.exit(2)
label = ["fine", "refused"][len(earlier) % 2]
print("noise")
if len(earlier) < 2:
    (workspace / "how").write_text(label)
    step = {"kind": "search", "count": f"{len(earlier) + 1} of 2", "origin": "tree", "name": "n", "label": label}
    print(json.dumps({**step, "folder": str(workspace.absolute())}))
else:
    panel = {"default": 0.5, "winner": 0.6}
    print(json.dumps({"kind": "done", "label": "fine", "panel": panel, "domains": {"a": panel}, "result": "r", "overlay": "o"}))
"""
EVALUATE = """
import os, pathlib, subprocess, sys, time
how = pathlib.Path("how").read_text()
print("evaluate:", how, os.environ["BELLWETHER_TRACKING"], flush=True)
if how == "hold":
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    print("child", child.pid, flush=True)
    time.sleep(300)
sys.exit({"refused": 2, "outside": 1}.get(how, 0))
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("BELLWETHER_TRACKING", raising=False)
    for folder in (tmp_path, tmp_path / "workspace"):
        (folder / "stages").mkdir(parents=True)
        for name, text in (("__init__", ""), ("designs", DESIGN), ("evaluate", EVALUATE)):
            (folder / "stages" / f"{name}.py").write_text(text)
    (tmp_path / "dvc.yaml").write_text("stages: {evaluate: {cmd: x, params: [resources.device]}}\n")
    return tmp_path


def step(checkout: Path, how: str) -> dict[str, Any]:
    (checkout / "workspace" / "how").write_text(how)
    return {"folder": str(checkout / "workspace"), "label": how}


def test_settings_are_validated_and_become_overrides() -> None:
    assert DesignSearch().changes == []
    given = DesignSearch(method="random", budget=9, overrides=["design.tasks=4"])
    assert given.changes == ["design.tasks=4", "design.method=random", "design.budget=9"]
    for wrong in ({"budget": 0}, {"method": "best"}, {"overrides": ["design.tasks"]}, {"retries": 11}, {"tasks": 3}):
        with pytest.raises(ValidationError):
            DesignSearch(**wrong)
    for field in DesignSearch.model_json_schema()["properties"].values():
        assert field["title"]
        assert field["description"]


def test_next_step_comes_from_the_command_line(checkout: Path) -> None:
    assert next_step(checkout, ["design.budget=2"], "--ended", "1.5")["kind"] == "search"
    assert (checkout / "calls").read_text() == '["--ended", "1.5", "--set", "design.budget=2"]\n'
    with pytest.raises(StageFailedError, match=r"unknown key 'design\.budgets'") as error:
        next_step(checkout, ["design.budgets=1"])
    assert error.value.bad_parameters


def test_rejected_design_does_not_fail_the_flow(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: exit code 2 means an invalid design, and the reason is returned; any other failure has an outside cause and may
    be retried."""
    monkeypatch.setattr(module, "logger", lambda: print)
    done = evaluate.fn(step(checkout, "fine"), False)
    assert (done.name, done.data[1]) == ("Evaluated", "")
    assert done.data[0] > 0
    refused = evaluate.fn(step(checkout, "refused"), False)
    assert (refused.name, refused.data[1]) == ("Rejected", "evaluate: refused off")
    with pytest.raises(
        StageFailedError, match=r"(?s)evaluating 'outside' failed \(exit code 1\).*evaluate: outside off"
    ) as error:
        evaluate.fn(step(checkout, "outside"), False)
    assert not error.value.bad_parameters
    assert error.value.code != BAD_PARAMETERS


def test_cancelling_the_flow_ends_its_processes(checkout: Path) -> None:
    """Contract: an exception in the waiting thread, which is what cancelling raises, leaves no process behind."""

    class CancelledError(Exception):
        pass

    children = []

    def say(line: str) -> None:
        if "child" in line:
            children.append(int(line.split()[-1]))
            raise CancelledError

    step(checkout, "hold")
    with pytest.raises(CancelledError):
        run_supervised(
            ["-m", "stages.evaluate"], checkout / "workspace", {**python_environment(), "BELLWETHER_TRACKING": "off"}, say
        )
    (child,) = children
    assert not psutil.pid_exists(child), "a child in its own session is ended, too"


@pytest.mark.slow
def test_flow_reports_each_evaluation_to_the_command_line(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: each evaluation's duration, and why a design was rejected, is passed to the next call; the result is logged."""
    from prefect.testing.utilities import prefect_test_harness  # it imports Prefect's server

    monkeypatch.setattr(module, "logger", lambda: print)
    with prefect_test_harness():
        done = module.design(DesignSearch(budget=2), str(checkout))
    assert done["kind"] == "done"
    calls = [json.loads(line) for line in (checkout / "calls").read_text().splitlines()]
    budget = ["--set", "design.budget=2"]
    assert calls[0] == budget
    fine, refused = calls[1:]
    assert [fine[0], *fine[2:]] == ["--ended", *budget]
    assert [refused[0], *refused[2:]] == ["--ended", "--failed", "evaluate: refused off", *budget]
    assert min(float(fine[1]), float(refused[1])) >= 0
    log = capsys.readouterr().out
    assert "on the frozen panels 60.0 %, default 50.0 %" in log
    assert "python -m stages.params --apply o" in log
