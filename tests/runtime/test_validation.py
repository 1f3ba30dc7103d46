"""Checks of settings: finite and bounded numbers, text that can be encoded, readable messages."""

from __future__ import annotations

from typing import Any

import pytest

from stages.curation.raw import Rejection
from stages.environments.registry import load_domain
from stages.params import ParamsError, parse_params
from stages.records.sections import deep_merge
from stages.runtime.validation import brief, shortened

MINIMAL: dict[str, Any] = {"domains": ["search"], "per_domain": {"search": {}}}
LONE_SURROGATE = "a\ud800"


def error_of(**changes: Any) -> str:
    with pytest.raises(ParamsError) as error:
        parse_params(deep_merge(MINIMAL, changes))
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sft": {"eval_every": 2**63}}, "'sft.eval_every' holds an integer outside [-2^63, 2^63)"),
        ({"rl": {"steps": 10**5000}}, "'rl.steps' holds an integer outside"),
        ({"sft": {"learning_rate": float("inf")}}, "'sft.learning_rate' holds inf; give a finite number"),
        ({"merge": {"weights": {"search": float("inf")}}}, "'merge.weights' holds inf; give a finite number"),
        ({"merge": {"lam": float("nan")}}, "'merge.lam' holds nan"),
        ({"evaluate": {"scaffold": {"note": LONE_SURROGATE}}}, r"'evaluate.scaffold.note' holds 'a\ud800', which has half"),
        ({"rl": {"settings": True}}, "'rl.settings' must be a mapping of the algorithm's own keys"),
    ],
)
def test_unrepresentable_values_are_rejected(changes: dict[str, Any], words: str) -> None:
    """Contract: what no tensor, table or file can hold is rejected, and the error names the key."""
    assert words in error_of(**changes)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("search", {"hops": {" 2": 1.0}}, "hops has the invalid key ' 2'"),
        ("search", {"hops": {2: float("inf")}}, "'per_domain.search.environment.hops' holds inf"),
        ("code", {"sandbox": {"steps": 2**64}}, "'per_domain.code.environment.sandbox.steps' holds an integer outside"),
        ("code_folder", {"folder": f"data/raw/{LONE_SURROGATE}"}, "half of a surrogate pair"),
        ("wordle", {"levels": [{"letters": 2, "alphabet": 3, "weight": "2"}]}, "valid number (given: '2', which"),
    ],
)
def test_environment_settings_have_the_same_checks(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamsError) as error:
        load_domain(name, settings)
    assert words in str(error.value)
    load_domain("search", {"hops": {2: 1, "3": 0.5}})


def test_messages_stay_short_whatever_was_given() -> None:
    """Contract: long values, keys and lists are shortened in messages, and so is a long list of mistakes."""
    long = "x" * 70_000
    for changes in (
        {"seed": long},
        {long: 1},
        {"domains": ["search"] * 5000},
        {"rl": {"algorithm": long}},
        {"sft": {"epochs": [long] * 9}},
    ):
        assert len(error_of(**changes)) < 2000
    lines = error_of(rl={f"unknown{number}": 1 for number in range(500)}).splitlines()
    assert 1 < len(lines) <= 21
    assert lines[-1] == f"params.yaml: {501 - len(lines)} more mistakes"
    assert sum(map(len, lines)) < 3200
    assert len(str(Rejection("malformed", long, "data/raw/a.jsonl", 7))) < 2000


def test_given_values_are_shortened() -> None:
    assert shortened("key") == "'key'"
    assert len(shortened(["x" * 500] * 500)) < 1000
    assert shortened(16**5000) == "a number of 20001 bits"
    assert brief("a short message") == "a short message"
    assert brief("a" * 700 + "b" * 9000 + "c" * 300, 1000).endswith("[... 9084 characters ...] " + "c" * 250)
