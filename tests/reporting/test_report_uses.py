"""Uses of annotations in the report: those of the run, and the verdicts of the claims board."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.claims.experiment import FOLDER, load_experiment
from stages.params import ROOT, Params, parse_params
from stages.records.sections import deep_merge
from stages.reporting import annotation_uses
from stages.reporting.blocks import Table, Text
from stages.reporting.board.rows import rows as board_rows
from stages.reporting.board.rows import saved_results
from stages.reporting.inputs import ROLLOUTS, Inputs, load_inputs
from stages.reporting.kept import Measured
from stages.reporting.page import DETAILS, SUMMARY
from stages.reporting.sections.search import search_section
from stages.reporting.sections.uses import life_blocks, use_blocks, used
from stages.reporting.this_run import this_run
from stages.reporting.tree_life import ARMS, SLUGS, bought

CLAIM = {
    **{"says": "Values help.", "state": "undecided", "difference": "+1.0 points (−2.0 to +4.0)"},
    **{"gain": True, "cheaper": False, "checked": None},
}
MEASURED = {"claims": [CLAIM], "environment": "search", "environment_steps": 12000, "seeds": 5}


LIFE = {
    **{"slug": "lifecycle", "environment": "search", "environment_steps": 12000, "seeds": 8, "target": 60, "tree_steps": 1500},
    "arms": [
        {"use": "RL", "trees": False, "success": 0.77, "curve": 0.7, "steps": 2960.0, "seconds": 54.1},
        {"use": "paths", "trees": True, "success": 0.71, "curve": 0.66, "steps": 4460.0, "seconds": 60.8},
        {"use": "pairs", "trees": True, "success": 0.78, "curve": 0.73, "steps": 2240.0, "seconds": 67.9},
        {"use": "credit", "trees": True, "success": 0.77, "curve": 0.71, "steps": None, "seconds": 74.1},
    ],
}


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
        ({"algorithm": "opsd", "settings": {"source": "trees"}}, ["solutions for the teacher"]),
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


def test_a_judge_model_is_a_use_unless_it_lies_elsewhere(inputs: Inputs) -> None:
    """Contract: salmon's judge and critic are the model that annotate fits; a judge in a folder of the user's is not."""
    rl: dict[str, Any] = {"algorithm": "salmon"}
    fitted = {"judge_model": {"kind": "reward", "labels": "policy", "principles": {}}}
    params = with_params(inputs, rollout={"tasks": 96}, per_domain={"search": {"rl": rl, "annotate": fitted}})
    assert used(params, "search") == ["critic initialised from the judge model", "rewards from the judge model"]
    rl |= {"judge": {"local": {"path": "models/judge"}}, "critic": {"init": "policy"}}
    assert used(with_params(inputs, per_domain={"search": {"rl": rl}}), "search") == []


def test_domains_without_trees_are_not_called_unused(inputs: Inputs) -> None:
    """Contract: where annotate.tasks is 0 the report says that the trees are off, and how they are switched off where idle."""
    params = with_params(inputs, per_domain={"search": {"annotate": {"tasks": 0}}})
    text = text_of(replace(inputs, params=params, uses=None))
    assert "Off, and nothing needs it: search (annotate.tasks: 0)." in text
    assert "Not used by later stages: textworld. The viewer of episodes shows the step-value model's values." in text
    assert "annotate.tasks: 0 grows no trees" in text
    off = {name: replace(given, annotate={"trees": 0}, nodes=[], labels=[], pairs=[]) for name, given in inputs.domains.items()}
    shown = [block.text for block in search_section(replace(inputs, domains=off)).blocks if isinstance(block, Text)]
    assert shown.count("No trees were grown: annotate.tasks is 0.") == 2
    assert not any("dvc repro" in text for text in shown)


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
    assert used(with_params(inputs, rollout={"tasks": 96}, per_domain={"search": params}), "search") == []


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
    assert [life["environment"] for life in quoted["lives"]][:2] == ["search", "textworld"]
    rows = [
        row for row in board_rows(ROOT) if row.slug in annotation_uses.SLUGS or (row.slug, row.claim.arm) in annotation_uses.ARMS
    ]
    assert len([row for row in rows if row.slug not in annotation_uses.SLUGS]) == len(annotation_uses.ARMS)
    assert [claim["state"] for claim in quoted["claims"]] == [row.state for row in rows]
    assert {row.claim.against for row in rows} & set(annotation_uses.WITHOUT)
    assert any(claim["gain"] for claim in quoted["claims"])
    assert text == (ROOT / annotation_uses.FILE).read_text(encoding="utf-8")


def test_what_the_trees_bought_counts_their_steps() -> None:
    """Contract: 2,960 steps without trees; pairs save 720 of them, and the trees cost 1,500. A use that saved more would pay."""
    table, text = life_blocks(LIFE)
    assert isinstance(table, Table)
    assert isinstance(text, Text)
    assert [row[3:] for row in table.rows] == [
        ["2,960", "2,960", "54"],
        ["4,460", "5,960", "61"],
        ["2,240", "3,740", "68"],
        ["–", "–", "74"],
    ]
    assert "on the way to 60 % is pairs: 720 steps, which does not pay for them" in text.text
    (_, cheap) = life_blocks({**LIFE, "tree_steps": 700})
    assert isinstance(cheap, Text)
    assert "720 steps, which pays for them" in cheap.text
    slower = [{**arm, "steps": 3000} if arm["trees"] and arm["steps"] else arm for arm in LIFE["arms"]]
    (_, none) = life_blocks({**LIFE, "arms": slower})
    assert isinstance(none, Text)
    assert "No use of them saves any of RL's on the way to 60 %" in none.text


def test_cost_of_this_runs_trees_is_in_steps_and_seconds(inputs: Inputs) -> None:
    measured = Measured(seconds=11.0, cpu_seconds=20.0, peak_bytes=1, peak_gpu_bytes=0, machine="m", runs=1)
    kept = [this_run(inputs).model_copy(update={"measured": {"annotate@search": measured}})]
    grown = {name: replace(given, annotate={"environment_steps": 1234}) for name, given in inputs.domains.items()}
    own = replace(inputs, domains=grown, kept=kept, uses={**MEASURED, "lives": [LIFE]})
    text = text_of(own)
    assert "Cost of this run's trees: textworld 1,234 environment steps; search 1,234 environment steps, 11 s (times" in text
    assert "which does not pay for them" in text
    assert "(times" not in text_of(replace(own, kept=[]))


@pytest.mark.parametrize("slug", SLUGS)
def test_the_experiments_on_the_life_are_read_as_their_pages_have_them(slug: str, tmp_path: Path) -> None:
    """Contract: every arm of the table is one of the experiment's, and means are over the seeds that all of them have."""
    experiment = load_experiment(ROOT / FOLDER / f"{slug}.yaml")
    assert set(ARMS) <= set(experiment.arms)
    assert bought(tmp_path, slug) is None
    found = bought(ROOT, slug)
    if saved_results(ROOT, slug, experiment) is None:
        assert found is None
        return
    assert found is not None
    assert found["seeds"] >= experiment.looks[0]
    assert [arm["use"] for arm in found["arms"]] == [use for use, _ in ARMS.values()]
    assert all(arm["steps"] is not None for arm in found["arms"])
    assert found["rates"]["low"] <= found["rates"]["difference"] <= found["rates"]["high"]


def test_a_run_without_rollouts_and_trees_has_a_whole_report(inputs: Inputs) -> None:
    """Contract: every chapter is written where rollout.tasks and annotate.tasks are 0, and those of these stages say so."""
    params = with_params(inputs, rollout={"tasks": 0}, annotate={"tasks": 0})
    off = {
        name: replace(
            given,
            annotate={"trees": 0, "iterations": 0, "environment_steps": 0, "policy_tokens": 0},
            rollout={"tasks": 0, "episodes": 0},
            episodes={source: rows for source, rows in given.episodes.items() if source != ROLLOUTS},
            **{"nodes": [], "labels": [], "pairs": []},
        )
        for name, given in inputs.domains.items()
    }
    rates = {"difference": 0.012, "low": -0.016, "high": 0.041, "effect": "equivalent"}
    lives = [{**LIFE, "slug": "lifecycle", "rates": rates}, {**LIFE, "rates": None}]
    without = replace(inputs, params=params, domains=off, uses={**MEASURED, "lives": lives})
    found = [section for build in (*SUMMARY, *DETAILS) if (section := build(without)) is not None]
    text = " ".join(block.text for section in found for block in section.blocks if isinstance(block, Text))
    assert "search: no attempts were made: rollout.tasks is 0." in text
    assert "success rates is worth: on search +1.2 points (−1.6 to +4.1, equivalent), reports/claims/lifecycle.md." in text
    assert "No trees were grown: annotate.tasks is 0." in text
    assert "dvc repro rollout@" not in text
    assert "dvc repro annotate@" not in text
