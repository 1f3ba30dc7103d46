"""The search over designs as a flow: what it asks of the command line, what becomes of evaluations that fail, and its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.testing.utilities import prefect_test_harness
from pydantic import ValidationError

import flows  # noqa: F401  (its settings must be there before Prefect is imported)
from flows import design as module
from flows.design import DesignSearch, evaluate, next_step
from flows.process import BAD_PARAMETERS, StageFailedError, python_environment, run_supervised

DESIGN = """
import json, pathlib, sys
place = pathlib.Path("place")
place.mkdir(exist_ok=True)
diary = pathlib.Path("diary")
said = diary.read_text().splitlines() if diary.exists() else []
diary.write_text("".join(line + chr(10) for line in [*said, json.dumps(sys.argv[1:])]))
if "design.budgets=1" in sys.argv:
    print("design: params.yaml with --set: unknown key 'design.budgets'", file=sys.stderr)
    sys.exit(2)
label = ["fine", "refused"][len(said) % 2]
print("noise")
if len(said) < 2:
    (place / "how").write_text(label)
    step = {"kind": "search", "count": f"{len(said) + 1} of 2", "origin": "tree", "name": "n", "label": label}
    print(json.dumps({**step, "folder": str(place.absolute())}))
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
    for folder in (tmp_path, tmp_path / "place"):
        (folder / "stages").mkdir(parents=True)
        for name, text in (("__init__", ""), ("designs", DESIGN), ("evaluate", EVALUATE)):
            (folder / "stages" / f"{name}.py").write_text(text)
    (tmp_path / "dvc.yaml").write_text("stages: {evaluate: {cmd: x, params: [resources.device]}}\n")
    return tmp_path


def step(checkout: Path, how: str) -> dict[str, Any]:
    (checkout / "place" / "how").write_text(how)
    return {"folder": str(checkout / "place"), "label": how}


def test_settings_are_checked_before_anything_runs() -> None:
    assert DesignSearch().changes == []
    given = DesignSearch(method="random", budget=9, overrides=["design.tasks=4"])
    assert given.changes == ["design.tasks=4", "design.method=random", "design.budget=9"]
    for wrong in ({"budget": 0}, {"method": "best"}, {"overrides": ["design.tasks"]}, {"retries": 11}, {"tasks": 3}):
        with pytest.raises(ValidationError):
            DesignSearch(**wrong)
    for field in DesignSearch.model_json_schema()["properties"].values():
        assert field["title"]
        assert field["description"]


def test_a_step_is_what_the_command_line_says(checkout: Path) -> None:
    assert next_step(checkout, ["design.budget=2"], "--ended", "1.5")["kind"] == "search"
    assert (checkout / "diary").read_text() == '["--ended", "1.5", "--set", "design.budget=2"]\n'
    with pytest.raises(StageFailedError, match=r"unknown key 'design\.budgets'") as error:
        next_step(checkout, ["design.budgets=1"])
    assert error.value.bad_parameters


def test_a_design_that_is_refused_is_no_failure_of_the_flow(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: exit code 2 is the design's fault and is told on; anything else is from outside and may be tried again."""
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


def test_ending_the_flow_ends_what_it_started(checkout: Path) -> None:
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
        run_supervised(["-m", "stages.evaluate"], checkout / "place", {**python_environment(), "BELLWETHER_TRACKING": "off"}, say)
    (child,) = children
    assert not psutil.pid_exists(child), "it was in a session of its own, and is gone all the same"


def test_the_flow_goes_from_step_to_step(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: each evaluation's end, and why a design could not be run, goes back to the command line; the end is told."""
    monkeypatch.setattr(module, "logger", lambda: print)
    with prefect_test_harness():
        done = module.design(DesignSearch(budget=2), str(checkout))
    assert done["kind"] == "done"
    diary = [json.loads(line) for line in (checkout / "diary").read_text().splitlines()]
    budget = ["--set", "design.budget=2"]
    assert diary[0] == budget
    fine, refused = diary[1:]
    assert [fine[0], *fine[2:]] == ["--ended", *budget]
    assert [refused[0], *refused[2:]] == ["--ended", "--failed", "evaluate: refused off", *budget]
    assert min(float(fine[1]), float(refused[1])) >= 0
    said = capsys.readouterr().out
    assert "on the frozen panels 60.0 %, default 50.0 %" in said
    assert "python -m stages.params --apply o" in said
