"""Uses of annotations in the report: those of the run, and the verdicts of the claims board."""

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


def with_params(inputs: Inputs, **values: Any) -> Params:
    return parse_params(deep_merge(inputs.params.model_dump(mode="json"), values))


def text_of(inputs: Inputs) -> str:
    return " ".join(block.text for block in use_blocks(inputs) if isinstance(block, Text))


def test_domains_without_uses_are_listed(inputs: Inputs) -> None:
    assert "Not used by later stages: textworld, search." in text_of(replace(inputs, uses=None))


@pytest.mark.parametrize(
    ("rl", "words"),
    [
        ({"credit": {"kind": "annotated"}}, ["step credit from the step-value model"]),
        ({"algorithm": "ppo", "critic": {"init": "value_model"}}, ["critic initialised from the step-value model"]),
        ({"curriculum": {"kind": "value"}}, ["task curriculum from the step-value model"]),
        ({"algorithm": "step_dpo"}, ["preference pairs for RL"]),
        ({"algorithm": "tree_bc"}, ["correct paths for RL"]),
        ({"warm_start": {"algorithm": "tree_bc"}}, ["correct paths for RL"]),
    ],
)
def test_each_use_is_listed_for_its_domain(inputs: Inputs, rl: dict[str, Any], words: list[str]) -> None:
    head = inputs.params.section("annotate", "search").value_model.head.model_dump()
    if "critic" in rl:
        rl = {**rl, "critic": {**rl["critic"], "head": head}}
    params = with_params(inputs, per_domain={"search": {"rl": rl}})
    assert used(params, "search") == words
    assert used(params, "textworld") == []
    text = text_of(replace(inputs, params=params))
    assert f"search: {words[0]}." in text
    assert "Not used by later stages: textworld." in text


def test_q_model_is_a_use_only_in_domains_that_have_one(inputs: Inputs) -> None:
    own = {"search": {"annotate": {"q_model": {"kind": "step_dpo"}}}}
    params = with_params(inputs, per_domain=own, evaluate={"models": ["sft", "sft+q"]})
    assert used(params, "search") == ["best-of-n actions by the Q-model in evaluation"]
    assert used(params, "textworld") == []


def test_imported_pairs_and_broadcast_rewards_are_no_uses(inputs: Inputs) -> None:
    imported = {"algorithm": "dpo", "preference": {"source": "imported"}}
    own = {"rl": imported, "curate": {"imports": ["data/raw/pairs.jsonl"]}}
    assert used(with_params(inputs, per_domain={"search": own}), "search") == []
    broadcast: dict[str, Any] = {"algorithm": "ppo", "credit": {"kind": "progress", "step_reward": "rloo_broadcast"}}
    broadcast |= {"advantage": {"level": "turn"}, "critic": {"head": {"loss": "mse"}}}
    params = {"rl": broadcast, "annotate": {"progress": {"kind": "spa"}}}
    assert used(with_params(inputs, per_domain={"search": params}), "search") == []


def test_verdicts_of_the_claims_board_are_quoted(inputs: Inputs) -> None:
    """Contract: a gain is claimed only if the board has reproduced it against a run without annotations; the reason given is a
    number of this run."""
    blocks = use_blocks(replace(inputs, uses=MEASURED))
    (table,) = [block for block in blocks if isinstance(block, Table)]
    assert table.rows == [["Values help.", "undecided", CLAIM["difference"]]]
    assert "12,000 environment steps" in table.title
    assert inputs.domains["search"].annotate is not None
    variance = inputs.domains["search"].annotate["value_model"]["calibration"]["explained_variance"]
    text = text_of(replace(inputs, uses=MEASURED))
    assert "No use has a significant gain" in text
    assert f"search {100 * variance:.0f} %" in text

    def of(**changes: Any) -> str:
        return text_of(replace(inputs, uses={**MEASURED, "claims": [{**CLAIM, **changes}]}))

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


def test_gain_over_cheaper_baseline_is_not_a_significant_gain(inputs: Inputs) -> None:
    """Contract: a claim reproduced against a cheaper baseline is in the table, and the summary says why it is not a gain."""
    cheap = {**CLAIM, "gain": False, "cheaper": True, "state": "reproduced"}
    text = text_of(replace(inputs, uses={**MEASURED, "claims": [CLAIM, cheap]}))
    assert "No use has a significant gain" in text
    assert "cheaper baselines" in text
    assert "cheaper" not in text_of(replace(inputs, uses=MEASURED))
    gain = {**CLAIM, "state": "reproduced", "says": "It gains."}
    shown = text_of(replace(inputs, uses={**MEASURED, "claims": [gain, cheap]}))
    assert "Significant gain over the same run without annotations: It gains." in shown
    assert "cheaper" not in shown


def test_q_model_initialised_from_value_model_is_a_use(inputs: Inputs) -> None:
    q_model = {"kind": "regression", "init": "value_model"}
    trained = {"q_model": q_model, "value_model": {"trains": "all"}}
    assert used(with_params(inputs, annotate=trained), "search") == ["Q-model initialised from the step-value model"]
    assert used(with_params(inputs, annotate={"q_model": {"kind": "regression"}}), "search") == []


def test_quoted_verdicts_match_the_board() -> None:
    (text,) = annotation_uses.files(ROOT).values()
    quoted = json.loads(text)
    rows = [
        row for row in board_rows(ROOT) if row.slug in annotation_uses.SLUGS or (row.slug, row.claim.arm) in annotation_uses.ARMS
    ]
    assert len([row for row in rows if row.slug not in annotation_uses.SLUGS]) == len(annotation_uses.ARMS)
    assert [claim["state"] for claim in quoted["claims"]] == [row.state for row in rows]
    assert {row.claim.against for row in rows} & set(annotation_uses.WITHOUT)
    assert any(claim["gain"] for claim in quoted["claims"])
    assert text == (ROOT / annotation_uses.FILE).read_text(encoding="utf-8")
