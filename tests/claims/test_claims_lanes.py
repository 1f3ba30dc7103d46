"""Lanes of the board: what their arms set, what they refuse, and how a page describes their runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rloo_experiment import CHOICE, PARAMS, SPEC, experiment

from stages.claims.arms import arm_values, run_values, start_values
from stages.claims.checks import check_experiment
from stages.claims.experiment import FOLDER, Experiment
from stages.claims.plan import metrics_of, planned_runs
from stages.control.problems import PROBLEMS
from stages.reporting.board.conditions import conditions
from stages.reporting.board.experiment_page import LANES
from stages.reporting.board.pages import pages as board_pages
from stages.runtime.validation import ParamsError

OFFLINE: dict[str, Any] = {
    **{name: SPEC[name] for name in ("method", "paper", "switch", "family")},
    "lane": "control",
    "environment": "guessing",
    "shared": {"updates": 5, "head": {"v_min": -6.0, "v_max": 2.0}},
    "arms": {"mse": {"head": {"loss": "mse"}}, "hl_gauss": {"noise": 0.3}},
    "claims": [{"says": "x", "arm": "hl_gauss", "against": "mse", "metric": "offline.win_rate"}],
}


def test_offline_lane_has_its_own_settings() -> None:
    """Contract: arms override the lane's settings and nothing of params.yaml; each run has its seed; an invalid key names its
    arm."""
    one = Experiment.model_validate(OFFLINE)
    check_experiment(one, PARAMS, "x.yaml")
    runs = planned_runs(one, PARAMS)
    assert [run.name for run in runs[:3]] == ["mse/0", "hl_gauss/0", "mse/1"]
    assert runs[2].values == {"updates": 5, "head": {"v_min": -6.0, "v_max": 2.0, "loss": "mse"}, "seed": 1}
    assert [run.key for run in planned_runs(one, {**PARAMS, "rl": {"learning_rate": 9.0}})] == [run.key for run in runs]
    assert "offline.win_rate" in metrics_of(one)
    bad = Experiment.model_validate({**OFFLINE, "arms": {"mse": {"updates": 0}, "hl_gauss": {}}})
    with pytest.raises(ParamsError, match=r"x\.yaml: arm 'mse'.*updates.*greater than or equal to 1"):
        check_experiment(bad, PARAMS, "x.yaml")


def test_intervals_of_control_problems_are_over_all_that_is_random() -> None:
    """Contract: no page says of a problem whose seeds draw their own tasks that its intervals leave the tasks out."""
    one = Experiment.model_validate(OFFLINE)
    saved = {"claims": [{"looks": [{"clusters": 0}]}], "runs": {}, "trials": {}}
    assert " each seed has its own dataset of games. Intervals are over seeds. " in conditions(one, saved, "0")
    annotate = Experiment.model_validate(CHOICE)
    assert "do not contain the error of drawing other tasks" in conditions(annotate, saved, "0")
    labels = annotate.model_copy(update={"lane": "labels"})
    assert "each has its own known trees, but all have the same tasks of `search`." in conditions(labels, saved, "0")


def test_annotate_lane_evaluates_sft_and_seeds_all_stages() -> None:
    """Contract: the SFT policy plays unless the arm says how it chooses; the seed is also that of SFT and trees."""
    one = Experiment.model_validate(CHOICE)
    check_experiment(one, PARAMS, "x.yaml")
    plain, q = (run_values(one, arm, 2, PARAMS) for arm in ("plain", "q"))
    assert (plain["evaluate"]["models"], q["evaluate"]["models"]) == (["sft"], ["sft+q"])
    assert (plain["seed"], plain["rl"].get("seed")) == (2, None)
    assert start_values(plain) != start_values(run_values(one, "plain", 3, PARAMS))


def test_offline_methods_have_steps_instead_of_a_budget() -> None:
    """Contract: no budget ends these runs, and an arm may take fewer steps than the others."""
    values = {**SPEC, "budget": None, "shared": {"rollout": {"tasks": 96}, "rl": {"algorithm": "stored_pg", "steps": 40}}}
    one = Experiment.model_validate({**values, "arms": {"rloo": {"rl": {"algorithm": "b_coder"}}, "grpo": {"rl": {"steps": 9}}}})
    sections = [run_values(one, arm, 0, PARAMS)["rl"] for arm in ("rloo", "grpo")]
    assert [rl["steps"] for rl in sections] == [40, 9]
    assert all(rl.get("environment_steps") is None for rl in sections)
    check_experiment(one, PARAMS, "here")


def test_rl_arm_may_choose_the_evaluated_model() -> None:
    one = experiment(arms={"rloo": {}, "grpo": {"evaluate": {"models": ["rl@search+logprob"]}}})
    assert arm_values(one, "rloo", PARAMS)["evaluate"]["models"] == ["rl@search"]
    assert arm_values(one, "grpo", PARAMS)["evaluate"]["models"] == ["rl@search+logprob"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**OFFLINE, "budget": {"environment_steps": 5}}, "lane control plays no episodes"),
        ({**CHOICE, "environment": "guessing"}, "lane control, and no other, has guessing"),
        ({**SPEC, "budget": None}, "it ends the runs of lane rl"),
    ],
)
def test_settings_of_other_lanes_are_rejected(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experiment.model_validate(changes)


def test_board_describes_the_runs_of_a_lane(tmp_path: Path) -> None:
    for slug, values in (("offline", OFFLINE), ("choice", CHOICE)):
        path = tmp_path / FOLDER / f"{slug}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    page = "\n".join(board_pages(tmp_path).values())
    assert f"looks at 8, 12, 20 paired seeds, {PROBLEMS['guessing'].random}." in page
    assert "overrides of stages/control/settings.py" in page
    assert LANES["annotate"] in page
