"""`python -m stages.claims new`: a question becomes a valid experiment, listed on the board."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.claims.entries import entry_of
from stages.claims.experiment import FOLDER, Tune, load_experiment, slugs
from stages.claims.new import PIPELINE, listed, main
from stages.params import load_params
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[2]
ARMS = ["--arm", "grpo", "rl.algorithm=grpo", "--arm", "wide", "rl.algorithm=dapo", "rl.loss.clip_high=0.3"]


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    return load_params(ROOT / "params.yaml").model_dump()


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / FOLDER).mkdir(parents=True)
    shutil.copy(ROOT / PIPELINE, tmp_path / PIPELINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(params: dict[str, Any], *arguments: str) -> int:
    return main(arguments, lambda experiment, file: entry_of(ROOT, experiment, params, file), params)


def test_question_becomes_an_experiment(board: Path, params: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: the file is valid, with looks, tuning and a gate; the pipeline lists it and keeps everything else."""
    before = (board / PIPELINE).read_text()
    assert ask(params, "my_question", "--environment", "search", *ARMS, "--says", "Clip: higher is better, #1.") == 0
    found = load_experiment(board / FOLDER / "my_question.yaml")
    assert found.arms == {
        "grpo": {"rl": {"algorithm": "grpo"}},
        "wide": {"rl": {"algorithm": "dapo", "loss": {"clip_high": 0.3}}},
    }
    (claim,) = found.claims
    assert (claim.says, claim.arm, claim.against) == ("Clip: higher is better, #1.", "wide", "grpo")
    assert found.looks == [8, 12, 20]
    assert found.tune is not None
    assert found.gate is not None
    assert slugs(board) == ["my_question"]
    after = (board / PIPELINE).read_text()
    assert set(after.splitlines()) - set(before.splitlines()) == {"        - my_question"}
    names = yaml.safe_load(after)["stages"]["claim"]["matrix"]["method"]
    assert names == sorted([*yaml.safe_load(before)["stages"]["claim"]["matrix"]["method"], "my_question"])
    assert "python -m stages.claims my_question --check" in capsys.readouterr().out


def test_more_than_two_arms_are_compared_with_the_first(board: Path, params: dict[str, Any]) -> None:
    arms = ["--arm", "one", "--arm", "two", "rl.epochs=2", "--arm", "three", "rl.epochs=3"]
    arguments = ["--metric", "history.entropy.last", "--margin", "0.1", "--threshold", "0.05"]
    assert ask(params, "epochs", "--environment", "search", *arms, *arguments) == 0
    claims = load_experiment(board / FOLDER / "epochs.yaml").claims
    assert [(claim.arm, claim.against, claim.margin, claim.threshold) for claim in claims] == [
        ("two", "one", 0.1, 0.05),
        ("three", "one", 0.1, 0.05),
    ]


def test_arms_that_set_the_tuned_key_keep_it(board: Path, params: dict[str, Any]) -> None:
    """Contract: tuning would give all arms one learning rate, so an experiment about it is not tuned; `tune` added to it, or the
    key to an arm, is refused."""
    arms = ["--arm", "low", "rl.learning_rate=0.0003", "--arm", "high", "rl.learning_rate=0.001"]
    assert ask(params, "rates", "--environment", "search", *arms) == 0
    found = load_experiment(board / FOLDER / "rates.yaml")
    assert (found.tune, found.untuned) == (None, "The arms set rl.learning_rate.")
    tuned = found.model_copy(update={"untuned": None, "tune": Tune(key="rl.learning_rate", values=[0.0001, 0.0003])})
    with pytest.raises(ParamsError, match=r"rates\.yaml: arm 'low' sets rl\.learning_rate, which is tuned and replaced"):
        entry_of(ROOT, tuned, params, "rates.yaml")
    other = tuned.model_copy(update={"tune": Tune(key="rl.epochs", values=[1, 2])})
    assert entry_of(ROOT, other, params, "rates.yaml").experiment == other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Bad-Name", *ARMS], "small letters"),
        (["one", *ARMS[:3]], "at least twice"),
        (["one", *ARMS, "--environment", "chess"], "params.yaml has bank, briefing"),
        (["one", "--arm", "a", "--arm", "b", "rl.algoritm=grpo"], "algoritm"),
        (["one", "--arm", "a", "--arm", "b", "grpo"], "KEY=VALUE"),
        (["one", *ARMS, "--metric", "history.entropy.last"], "margin"),
        (["taken", *ARMS], "exists"),
        (["one", *ARMS, "--metric", "panel.succes"], "panel.succes does not exist (did you mean 'success'?): panel has success"),
        (["one", "--arm", "a", "--arm", "b", "rl.algorithm=grpoo"], "one.yaml: arm 'b': unknown rl.algorithm 'grpoo'; did you"),
        (["one", "--arm", "a", "merge.method=ties", "--arm", "b", "merge.method=dare"], "arm 'a' sets merge, but lane rl merges"),
    ],
)
def test_impossible_questions_leave_nothing(
    board: Path, params: dict[str, Any], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: exit code 64, a message, and no changed file."""
    (board / FOLDER / "taken.yaml").write_text("here\n")
    before = (board / PIPELINE).read_text()
    slug, *rest = arguments
    with pytest.raises(SystemExit) as end:
        ask(params, slug, "--environment", "search", *rest)
    assert end.value.code == 64
    assert message in capsys.readouterr().err
    assert (board / PIPELINE).read_text() == before
    assert sorted(path.name for path in (board / FOLDER).glob("*.yaml")) == ["dvc.yaml", "taken.yaml"]


def test_listing_twice_changes_nothing() -> None:
    text = (ROOT / PIPELINE).read_text()
    assert listed(text, "archer") == text
