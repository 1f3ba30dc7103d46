"""Settings mean what they say: numbers that can be computed with, text that can be written, messages that can be read."""

from __future__ import annotations

from typing import Any

import pytest

from stages.curation.raw import Rejection
from stages.environments.registry import load_domain
from stages.params import ParamsError, parse_params
from stages.records.sections import deep_merge
from stages.runtime.validation import brief, shortened

MINIMAL: dict[str, Any] = {"domains": ["search"], "per_domain": {"search": {}}}
HALF = "a\ud800"


def complaint(**changes: Any) -> str:
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
        ({"evaluate": {"scaffold": {"note": HALF}}}, r"'evaluate.scaffold.note' holds 'a\ud800', which has half"),
        ({"rl": {"settings": True}}, "'rl.settings' must be a mapping of the algorithm's own keys"),
    ],
)
def test_values_without_a_meaning_are_refused(changes: dict[str, Any], words: str) -> None:
    """Contract: what no tensor, table or file can hold is refused where it stands."""
    assert words in complaint(**changes)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("search", {"hops": {" 2": 1.0}}, "hops has the invalid key ' 2'"),
        ("search", {"hops": {2: float("inf")}}, "'per_domain.search.environment.hops' holds inf"),
        ("code", {"sandbox": {"steps": 2**64}}, "'per_domain.code.environment.sandbox.steps' holds an integer outside"),
        ("code_folder", {"folder": f"data/raw/{HALF}"}, "half of a surrogate pair"),
        ("wordle", {"levels": [{"letters": 2, "alphabet": 3, "weight": "2"}]}, "valid number (given: '2')"),
    ],
)
def test_settings_of_environments_are_checked_as_the_others_are(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamsError) as error:
        load_domain(name, settings)
    assert words in str(error.value)
    load_domain("search", {"hops": {2: 1, "3": 0.5}})


def test_messages_can_be_read_whatever_was_given() -> None:
    """Contract: a value, a key or a list of any length makes no message of that length, and many mistakes no page of them."""
    long = "x" * 70_000
    for changes in (
        {"seed": long},
        {long: 1},
        {"domains": ["search"] * 5000},
        {"rl": {"algorithm": long}},
        {"sft": {"epochs": [long] * 9}},
    ):
        assert len(complaint(**changes)) < 2000
    said = complaint(rl={f"unknown{number}": 1 for number in range(500)}).splitlines()
    assert 1 < len(said) <= 21
    assert said[-1] == f"params.yaml: {501 - len(said)} more mistakes"
    assert sum(map(len, said)) < 3200
    assert len(str(Rejection("malformed", long, "data/raw/a.jsonl", 7))) < 2000


def test_what_was_given_is_shown_in_short() -> None:
    assert shortened("key") == "'key'"
    assert len(shortened(["x" * 500] * 500)) < 1000
    assert shortened(16**5000) == "a number of 20001 bits"
    assert brief("a short message") == "a short message"
    assert brief("a" * 700 + "b" * 9000 + "c" * 300, 1000).endswith("[... 9084 characters ...] " + "c" * 250)
