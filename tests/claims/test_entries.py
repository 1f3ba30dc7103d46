"""Which experiments a session takes, and the params.yaml that each starts from."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from rloo_experiment import CHOICE, PARAMS, experiment, write

from stages.claims import __main__ as command
from stages.claims.arms import run_values
from stages.claims.code import code_of
from stages.claims.entries import Entry, chosen, load_entries, with_profile
from stages.claims.experiment import Experiment, peers, profiles
from stages.params import ROOT, load_params
from stages.runtime.validation import ParamsError


@pytest.fixture
def board(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        write(tmp_path, name)
    for name in ("c", "d"):
        write(tmp_path, name, profile="large")
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "large.yaml").write_text("rl: {learning_rate: 0.25}\nper_domain: {search: {rl: {steps: 7}}}\n")
    return tmp_path


def test_experiments_of_a_profile_run_only_when_asked_for(board: Path) -> None:
    assert list(chosen(board, [], None)) == ["a", "b"]
    assert list(chosen(board, [], "large")) == ["c", "d"]
    assert list(chosen(board, ["a", "d"], None)) == ["a", "d"]
    with pytest.raises(ParamsError, match="no experiment of reports/claims has profile small; their profiles are large"):
        chosen(board, [], "small")
    assert list(chosen(board, ["d"], "large")) == ["d"]
    with pytest.raises(ParamsError, match="not of profile large, but a: none; run each profile's experiments by themselves"):
        chosen(board, ["a", "d"], "large")


def test_times_and_runs_are_those_of_the_same_profile(board: Path) -> None:
    """Contract: what a run on a small model took says nothing about one on a large one."""
    assert peers(profiles(board), "a") == ["b"]
    assert peers(profiles(board), "c") == ["d"]


def test_a_profile_lies_over_params_and_under_the_experiment(board: Path) -> None:
    found = with_profile(board, "large", PARAMS)
    assert (found["rl"]["learning_rate"], found["rl"]["algorithm"]) == (0.25, "grpo")
    assert found["per_domain"]["search"]["rl"] == {"steps": 7, "group_size": 2}
    assert with_profile(board, None, PARAMS) == PARAMS
    with pytest.raises(ParamsError, match="unknown profile small; profiles has large"):
        with_profile(board, "small", PARAMS)
    (board / "profiles" / "large.yaml").write_text("rl: {learning_rat: 0.25}\n")
    with pytest.raises(ParamsError, match=r"profiles/large\.yaml.*unknown key 'rl\.learning_rat'"):
        with_profile(board, "large", PARAMS)


def test_shipped_experiments_on_gemma_clone_nothing_beside() -> None:
    """Contract: the profile's self-imitation would hide what arms differ in."""
    params = load_params(ROOT / "params.yaml").model_dump()
    names = [name for name, one in chosen(ROOT, [], "gemma-270m").items() if one.lane == "rl"]
    assert names
    for entry in load_entries(ROOT, names, params).values():
        assert entry.params["resources"]["precision"] == "bfloat16"
        for arm in entry.experiment.arms:
            values = run_values(entry.experiment, arm, 0, entry.params)
            assert values["rl"]["imitation"]["ratio"] in (None, 0.0), arm


def test_targets_are_the_stages_of_the_chosen_experiments(
    board: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(board)
    monkeypatch.setattr(sys, "argv", ["claim", "--targets", "--profile", "large"])
    assert command.main() == 0
    assert capsys.readouterr().out.split() == [f"reports/claims/dvc.yaml:claim@{name}" for name in ("c", "d")]


def test_results_name_the_code_of_the_commit_that_made_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what changes in the checkout while earlier experiments run is not in the hash of later ones, whose workspaces are
    of the commit at which the command started."""
    root = tmp_path / "checkout"
    (root / "stages").mkdir(parents=True)
    (root / "stages" / "rl.py").write_text("first")
    (root / "stages" / "merge.py").write_text("first")
    stages = {name: {"cmd": name, "deps": [f"stages/{name}.py"]} for name in ("rl", "merge")}
    (root / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    shutil.copytree(root, tmp_path / "before")
    monkeypatch.setattr(command, "clean_commit", lambda root: "c" * 40)
    one, other = experiment(), Experiment.model_validate(CHOICE)
    made = command.sessions(root, {"rl": Entry(one, PARAMS), "annotate": Entry(other, PARAMS)}, jobs=1)
    first = next(made)
    (root / "stages" / "rl.py").write_text("second")
    (second,) = made
    assert first.runner.code == code_of(tmp_path / "before", "rl")
    assert second.runner.code == code_of(tmp_path / "before", "annotate")
