"""Verdicts after an experiment's session: exit codes, judging again, and repeating runs of older code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_runner import PARAMS, SPEC, FakeRunner, experiment, run, saved

from stages.claims import __main__ as command
from stages.claims import verdict
from stages.claims.confirm import confirm
from stages.claims.experiment import Experiment
from stages.claims.results import result_path
from stages.claims.session import Session
from stages.reporting.board.conditions import conditions


def store(root: Path, one: Experiment, states: list[str | None]) -> None:
    """Verdicts that no stored run supports, and the params.yaml that runs would have."""
    (root / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    content = {"fixed": one.fixed, "environment": "search", "runs": {}, "trials": {}, "start": {}}
    result_path(root, "rloo").write_text(json.dumps({**content, "claims": [{"verdict": state} for state in states]}))


@pytest.mark.parametrize(
    ("states", "claim", "code"),
    [
        (["reproduced", "reproduced"], None, 0),
        (["reproduced", "not reproduced"], None, 1),
        (["undecided", "not reproduced"], None, 1),
        (["reproduced", "undecided"], None, 2),
        (["gate failed", "gate failed"], None, 2),
        ([None, "reproduced"], 1, 2),
        (["not reproduced", "reproduced"], 2, 0),
        (["not reproduced", "reproduced"], 1, 1),
        (["reproduced", "reproduced"], 3, 64),
    ],
)
def test_verdict_command_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list, claim: int | None, code: int
) -> None:
    one = experiment(tmp_path, claims=[*SPEC["claims"], *SPEC["claims"]])
    store(tmp_path, one, states)
    monkeypatch.chdir(tmp_path)
    arguments = ["rloo", *([] if claim is None else [str(claim)])]
    try:
        found = verdict.main(arguments)
    except SystemExit as end:
        found = end.code
    assert found == code


def test_verdict_of_a_changed_experiment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment(tmp_path)
    result_path(tmp_path, "rloo").write_text(json.dumps({"fixed": "0" * 16, "claims": [{"verdict": "reproduced"}]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["claims", "verdict", "rloo"])
    assert command.main() == 2
    assert "rloo 1: changed since it was run: RLOO is better." in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        verdict.main(["lite-ppo"])
    assert end.value.code == 64
    assert "unknown experiment lite-ppo; reports/claims has rloo" in capsys.readouterr().err


def test_verdict_of_other_parameters_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: a pipeline that asks after params.yaml has changed gets no answer from the runs before."""
    run(tmp_path, experiment(tmp_path))
    monkeypatch.chdir(tmp_path)
    for rate, code in ((0.01, 0), (0.02, 2)):
        changed = {**PARAMS, "rl": {**PARAMS["rl"], "learning_rate": rate}}
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(changed))
        assert verdict.main(["rloo"]) == code
    assert "rloo 1: changed since it was run: RLOO is better." in capsys.readouterr().out


def test_judging_again_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: verdicts follow a changed margin or look without new runs, and runs that the experiment no longer describes are
    dropped."""
    run(tmp_path, experiment(tmp_path))
    stricter = experiment(tmp_path, claims=[{**SPEC["claims"][0], "threshold": 0.5}])
    command.judge_again(tmp_path, {"rloo": command.Entry(stricter, PARAMS)})
    assert saved(tmp_path)["claims"][0]["verdict"] == "not reproduced"
    other = experiment(tmp_path, budget={"environment_steps": 50})
    command.judge_again(tmp_path, {"rloo": command.Entry(other, PARAMS)})
    assert (saved(tmp_path)["runs"], saved(tmp_path)["claims"][0]["verdict"]) == ({}, None)
    assert "judged 0 runs; 8 of other settings dropped" in capsys.readouterr().out


def newer(root: Path, **changes: Any) -> FakeRunner:
    """A runner of newer code, which measures other values if `changes` say so."""
    return type("Newer", (FakeRunner,), {"code": "e" * 16, **changes})(root)


def test_a_run_of_each_arm_of_older_code_is_repeated(tmp_path: Path) -> None:
    """Contract: equal results are written beside the stored ones, which stay; the page says so until the code changes again."""
    one = experiment(tmp_path)
    run(tmp_path, one)
    before, runner = saved(tmp_path), newer(tmp_path)
    assert confirm(Session(tmp_path, "rloo", one, PARAMS, runner, jobs=2))
    assert sorted(runner.played) == ["grpo/0", "rloo/0"]
    after = saved(tmp_path)
    assert after.pop("confirmed") == {"code": "e" * 16, "runs": ["grpo/0", "rloo/0"]}
    assert after == before
    page = conditions(one, saved(tmp_path), "e" * 16)
    assert "8 of 8 runs are of older code; one run of each of their arms, repeated" in page
    assert "which may or may not bear on them" in conditions(one, saved(tmp_path), "d" * 16)


def test_only_a_run_of_older_code_confirms_it(tmp_path: Path) -> None:
    """Contract: where an arm's first seed was made by today's code, the lowest seed of older code is repeated."""
    one = experiment(tmp_path)
    run(tmp_path, one)
    content = saved(tmp_path)
    content["runs"]["grpo/0"]["code"] = content["runs"]["grpo/1"]["code"] = "e" * 16
    result_path(tmp_path, "rloo").write_text(json.dumps(content))
    runner = newer(tmp_path)
    assert confirm(Session(tmp_path, "rloo", one, PARAMS, runner, jobs=2))
    assert sorted(runner.played) == ["grpo/2", "rloo/0"]


def test_a_repeated_run_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = experiment(tmp_path)
    run(tmp_path, one)
    changed = newer(tmp_path, success=lambda self, algorithm, seed, rate: {"rloo": 0.8, "grpo": 0.65}[algorithm])
    assert not confirm(Session(tmp_path, "rloo", one, PARAMS, changed, jobs=2))
    said = capsys.readouterr()
    assert "grpo/0 is not as stored: panel.cost 0.6, now 0.65" in said.err
    assert "another type of processor" in said.out
    assert saved(tmp_path)["confirmed"]["runs"] == ["rloo/0"]
    assert "; one run each of rloo, repeated" in conditions(one, saved(tmp_path), "e" * 16)


def test_nothing_of_todays_code_is_repeated(tmp_path: Path) -> None:
    one = experiment(tmp_path)
    run(tmp_path, one)
    runner = FakeRunner(tmp_path)
    assert confirm(Session(tmp_path, "rloo", one, PARAMS, runner, jobs=2))
    assert (runner.played, "confirmed" in saved(tmp_path)) == ([], False)
