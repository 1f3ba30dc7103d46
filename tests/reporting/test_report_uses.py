"""What the report says of the uses of annotations: those of the run, and what the board found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.claims import annotation_uses, board
from stages.params import ROOT, Params, deep_merge, parse_params
from stages.reporting.blocks import Table, Text
from stages.reporting.inputs import Inputs, load_inputs
from stages.reporting.sections.uses import use_blocks, used

CLAIM = {
    "says": "Values help.",
    "state": "undecided",
    "difference": "+1.0 points (−2.0 to +4.0)",
    "gain": True,
}
MEASURED = {"claims": [CLAIM], "environment": "search", "environment_steps": 12000, "seeds": 5}


@pytest.fixture
def inputs(full_run: tuple[Path, Params]) -> Inputs:
    return load_inputs(*full_run)


def changed(inputs: Inputs, **values: Any) -> Params:
    return parse_params(deep_merge(inputs.params.model_dump(mode="json"), values))


def said(inputs: Inputs) -> str:
    return " ".join(block.text for block in use_blocks(inputs) if isinstance(block, Text))


def test_a_run_that_uses_nothing_says_so(inputs: Inputs) -> None:
    text = said(replace(inputs, uses=None))
    assert "Nothing of it is used in textworld and search" in text
    assert "reports/annotation_uses.json is missing" in text


@pytest.mark.parametrize(
    ("rl", "words"),
    [
        ({"credit": {"kind": "annotated"}}, ["turns are credited by the step-value model"]),
        ({"algorithm": "ppo", "critic": {"init": "value_model"}}, ["the critic starts as the step-value model"]),
        ({"curriculum": {"kind": "value"}}, ["tasks are drawn by what the step-value model thinks of them"]),
        ({"algorithm": "step_dpo"}, ["its preference pairs are what the policy learns from"]),
    ],
)
def test_each_use_is_told_of_its_domain(inputs: Inputs, rl: dict[str, Any], words: list[str]) -> None:
    head = inputs.params.section("annotate", "search").value_model.head.model_dump()
    if "critic" in rl:
        rl = {**rl, "critic": {**rl["critic"], "head": head}}
    params = changed(inputs, per_domain={"search": {"rl": rl}})
    assert used(params, "search") == words
    assert used(params, "textworld") == []
    text = said(replace(inputs, params=params))
    assert f"search: {words[0]}." in text
    assert "Nothing of it is used in textworld:" in text


def test_the_boards_verdicts_are_quoted(inputs: Inputs) -> None:
    """Contract: a gain is called one only where the board has reproduced it, against a run without annotations."""
    blocks = use_blocks(replace(inputs, uses=MEASURED))
    (table,) = [block for block in blocks if isinstance(block, Table)]
    assert table.rows == [[CLAIM["says"], "undecided", CLAIM["difference"]]]
    assert "12,000 environment steps" in table.title
    assert "None of these uses was shown to be a gain" in said(replace(inputs, uses=MEASURED))
    shown = {**MEASURED, "claims": [{**CLAIM, "state": "reproduced"}]}
    assert "A gain over the same run without annotations was shown for: Values help." in said(replace(inputs, uses=shown))
    no_gain = {**MEASURED, "claims": [{**CLAIM, "state": "reproduced", "gain": False}]}
    assert "None of these uses" in said(replace(inputs, uses=no_gain))


def test_what_is_quoted_is_what_the_board_holds() -> None:
    (text,) = annotation_uses.files(ROOT).values()
    told = json.loads(text)
    rows = [row for row in board.rows(ROOT) if row.slug == annotation_uses.SLUG]
    assert [claim["state"] for claim in told["claims"]] == [row.state for row in rows]
    assert {row.claim.against for row in rows} & set(annotation_uses.WITHOUT)
    assert any(claim["gain"] for claim in told["claims"])
    assert text == (ROOT / annotation_uses.FILE).read_text(encoding="utf-8")
