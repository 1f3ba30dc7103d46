"""What the report says of the uses of annotations: those of the run, and what the board found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.params import ROOT, Params, parse_params
from stages.records.sections import deep_merge
from stages.reporting import annotation_uses
from stages.reporting.blocks import Table, Text
from stages.reporting.board.rows import rows as board_rows
from stages.reporting.inputs import Inputs, load_inputs
from stages.reporting.sections.uses import use_blocks, used

CLAIM = {
    **{"says": "Values help.", "state": "undecided", "difference": "+1.0 points (−2.0 to +4.0)"},
    **{"gain": True, "cheaper": False, "checked": None},
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
    assert "Not used by later stages: textworld, search." in said(replace(inputs, uses=None))


@pytest.mark.parametrize(
    ("rl", "words"),
    [
        ({"credit": {"kind": "annotated"}}, ["step credit from the step-value model"]),
        ({"algorithm": "ppo", "critic": {"init": "value_model"}}, ["critic initialised from the step-value model"]),
        ({"curriculum": {"kind": "value"}}, ["task curriculum from the step-value model"]),
        ({"algorithm": "step_dpo"}, ["preference pairs for RL"]),
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
    assert "Not used by later stages: textworld." in text


def test_a_q_model_is_of_use_where_there_is_one(inputs: Inputs) -> None:
    own = {"search": {"annotate": {"q_model": {"kind": "step_dpo"}}}}
    params = changed(inputs, per_domain=own, evaluate={"models": ["sft", "sft+q"]})
    assert used(params, "search") == ["best-of-n actions by the Q-model in evaluation"]
    assert used(params, "textworld") == []


def test_what_is_not_of_the_trees_is_no_use_of_them(inputs: Inputs) -> None:
    imported = {"algorithm": "dpo", "preference": {"source": "imported"}}
    own = {"rl": imported, "curate": {"imports": ["data/raw/pairs.jsonl"]}}
    assert used(changed(inputs, per_domain={"search": own}), "search") == []
    broadcast: dict[str, Any] = {"algorithm": "ppo", "credit": {"kind": "progress", "step_reward": "rloo_broadcast"}}
    broadcast |= {"advantage": {"level": "turn"}, "critic": {"head": {"loss": "mse"}}}
    params = {"rl": broadcast, "annotate": {"progress": {"kind": "spa"}}}
    assert used(changed(inputs, per_domain={"search": params}), "search") == []


def test_the_boards_verdicts_are_quoted(inputs: Inputs) -> None:
    """Contract: a gain is called one only where the board has reproduced it, against a run without annotations; a reason is a
    number of this run."""
    blocks = use_blocks(replace(inputs, uses=MEASURED))
    (table,) = [block for block in blocks if isinstance(block, Table)]
    assert table.rows == [["Values help.", "undecided", CLAIM["difference"]]]
    assert "12,000 environment steps" in table.title
    assert inputs.domains["search"].annotate is not None
    variance = inputs.domains["search"].annotate["value_model"]["calibration"]["explained_variance"]
    text = said(replace(inputs, uses=MEASURED))
    assert "No use has a significant gain" in text
    assert f"search {100 * variance:.0f} %" in text

    def of(**changes: Any) -> str:
        return said(replace(inputs, uses={**MEASURED, "claims": [{**CLAIM, **changes}]}))

    shown = of(state="reproduced")
    assert "Significant gain over the same run without annotations: Values help." in shown
    assert "This run uses none of it on search." in shown
    assert "No use has a significant gain" in of(state="reproduced", gain=False)
    assert "not been measured yet" in of(state="not run yet", difference="–")
    assert "failed its gate" in of(state="gate failed", difference="–")
    (table,) = [
        block
        for block in use_blocks(replace(inputs, uses={**MEASURED, "claims": [{**CLAIM, "checked": "by hand"}]}))
        if isinstance(block, Table)
    ]
    assert table.rows[0][1] == "undecided; checked: by hand"


def test_what_holds_against_less_is_no_gain_and_the_page_says_so(inputs: Inputs) -> None:
    """Contract: a claim that is reproduced against something cheaper is in the table, and the summary tells why it is no gain."""
    cheap = {**CLAIM, "gain": False, "cheaper": True, "state": "reproduced"}
    text = said(replace(inputs, uses={**MEASURED, "claims": [CLAIM, cheap]}))
    assert "No use has a significant gain" in text
    assert "cheaper baselines" in text
    assert "cheaper" not in said(replace(inputs, uses=MEASURED))
    gain = {**CLAIM, "state": "reproduced", "says": "It gains."}
    shown = said(replace(inputs, uses={**MEASURED, "claims": [gain, cheap]}))
    assert "Significant gain over the same run without annotations: It gains." in shown
    assert "cheaper" not in shown


def test_a_q_model_that_starts_as_the_value_model_is_a_use(inputs: Inputs) -> None:
    q_model = {"kind": "regression", "init": "value_model"}
    assert used(changed(inputs, annotate={"q_model": q_model}), "search") == ["Q-model initialised from the step-value model"]
    assert used(changed(inputs, annotate={"q_model": {"kind": "regression"}}), "search") == []


def test_what_is_quoted_is_what_the_board_holds() -> None:
    (text,) = annotation_uses.files(ROOT).values()
    told = json.loads(text)
    rows = [
        row for row in board_rows(ROOT) if row.slug in annotation_uses.SLUGS or (row.slug, row.claim.arm) in annotation_uses.ARMS
    ]
    assert len([row for row in rows if row.slug not in annotation_uses.SLUGS]) == len(annotation_uses.ARMS)
    assert [claim["state"] for claim in told["claims"]] == [row.state for row in rows]
    assert {row.claim.against for row in rows} & set(annotation_uses.WITHOUT)
    assert any(claim["gain"] for claim in told["claims"])
    assert text == (ROOT / annotation_uses.FILE).read_text(encoding="utf-8")
