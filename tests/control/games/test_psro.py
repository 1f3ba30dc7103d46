"""Cars at a merge: the world by hand, the meta-game's variance within pairs, what risk aversion changes, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from stages.control.games import psro
from stages.control.games.driving import (
    ACCELERATE,
    BRAKE,
    CRASH,
    KEEP,
    KNOWN,
    STEPS,
    Episodes,
    Values,
    aggressive,
    by_table,
    crashed,
    drive,
    known,
    mixture,
)
from stages.control.games.psro import Meta, gains, learn, penalty, run
from stages.control.games.risk_averse import best_response, exploitability, fictitious_play, selected, utility
from stages.control.games.settings import DrivingGame, RiskAversion

STAG = np.array([[4.0, 0.0], [3.0, 3.0]])
SMALL: dict[str, Any] = {"rounds": 2, "oracle_updates": 60, "meta_episodes": 60, "iterations": 200, "evaluate_episodes": 1000}


def table(action: int) -> np.ndarray:
    return np.full(KNOWN, action)


def test_crashes_are_in_the_shared_lane_only() -> None:
    """Next to each other, one lane apart, two cells apart, one through the other, and past it before the merge."""
    before = np.array([[6, 5], [4, 5], [7, 5], [6, 8], [5, 6]])
    after = np.array([[7, 6], [5, 6], [8, 6], [10, 8], [8, 6]])
    assert crashed(before, after).tolist() == [True, False, False, True, False]


def test_drivers_know_the_way_the_distance_and_both_speeds() -> None:
    """Numbers in the base of 7 places, 3 speeds, 9 distances and 3 speeds."""
    found = known(np.array([[0, 2], [9, 3]]), np.array([[1, 2], [0, 1]]))
    assert found.tolist() == [[(1 * 9 + 6) * 3 + 2, (8 * 9 + 2) * 3 + 1], [(18 * 9 + 0) * 3 + 1, (10 * 9 + 8) * 3 + 0]]
    assert known(np.array([[6, 2]]), np.array([[2, 2]])).max() < KNOWN


def test_returns_of_cars_that_keep_their_speed() -> None:
    """From starts 0, 1 and 2: cars less than two cells apart crash when the last is at the merge, others drive 15 cells."""
    episodes = drive((by_table(table(KEEP)), by_table(table(KEEP))), 3000, np.random.default_rng(0))
    assert episodes.crash.mean() == pytest.approx(7 / 9, abs=0.03)
    found = {round(float(value), 6) for value in episodes.returns[:, 0]}
    assert found == {STEPS * 1.0, 4 - CRASH, 5 - CRASH, 6 - CRASH}
    assert (episodes.returns[:, 0] == episodes.returns[:, 1]).all()
    steps = episodes.going[:, episodes.crash].sum(0)
    assert set(steps.tolist()) == {4, 5, 6}


def test_a_driver_of_the_mixture_drives_whole_episodes() -> None:
    drivers = [by_table(table(BRAKE)), by_table(table(ACCELERATE))]
    act, rng = mixture(drivers, np.array([0.3, 0.7])), np.random.default_rng(1)
    first, second = act(np.zeros(2000, np.int64), rng), act(np.zeros(2000, np.int64), rng)
    assert (first == second).all()
    assert (first == ACCELERATE).mean() == pytest.approx(0.7, abs=0.03)


def test_values_by_hand() -> None:
    """Rewards 1 and 2 and a credit of -0.5 at the end: returns to come 2.5 and 1.5. The second episode is over after one step."""
    knows, actions = np.array([[[7, 0], [7, 0]], [[8, 0], [8, 0]]]), np.array([[[2, 0], [0, 0]], [[1, 0], [0, 0]]])
    rewards = np.array([[[1.0, 0.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 0.0]]])
    episodes = Episodes(knows, actions, rewards, np.array([[True, True], [True, False]]), np.array([False, True]))
    values = Values()
    values.learn(episodes, 0, np.array([-0.5, 0.0]), 0.1)
    assert values.sums[7].tolist() == [1.0, 0.0, 2.5]
    assert values.sums[8].tolist() == [0.0, 1.5, 0.0]
    assert values.counts.sum() == 3
    assert values.greedy()[[7, 8, 9]].tolist() == [ACCELERATE, KEEP, KEEP]
    values.learn(episodes, 0, np.array([-0.5, 0.0]), 0.1)
    assert values.sums[7, 2] == pytest.approx(1.9 * 2.5)
    assert penalty(np.array([1.0, 3.0]), 2.0, 0.5).tolist() == [-0.5, -0.5]


def test_variance_within_pairs_is_a_cost_in_proportion() -> None:
    """Of own (0.5, 0.5) against (0.5, 0.5): 0.25 * 1 + 0.25 * 2. In the stag hunt against (0.9, 0.1), 0.2 within stag's pairs
    makes its mean 3.5 of 3.6: p = 0.5 / 1.44."""
    half, settings = np.full(2, 0.5), RiskAversion(gamma=0.5)
    noise = np.array([[1.0, 0.0], [0.0, 2.0]])
    assert utility(half, STAG, half, settings) - utility(half, STAG, half, settings, noise) == pytest.approx(0.375)
    facing, within = np.array([0.9, 0.1]), np.array([[0.2, 0.2], [0.0, 0.0]])
    assert best_response(STAG, facing, settings, within)[0] == pytest.approx(0.5 / 1.44)
    assert best_response(STAG, facing, settings, 10 * within).tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="set entropy to 0"):
        best_response(STAG, facing, RiskAversion(entropy=0.1), within)


@pytest.mark.parametrize(("gamma", "within", "chosen"), [(0.5, 0.0, 1), (0.25, 0.0, 0), (0.25, 1.0, 1), (0.0, 9.0, 0)])
def test_the_rule_that_selects_a_candidate(gamma: float, within: float, chosen: int) -> None:
    """Stag is worth 3.6 - 1.44 gamma - within gamma, hare 3."""
    noise = np.array([[within, within], [0.0, 0.0]])
    assert selected(STAG, np.array([0.9, 0.1]), gamma, noise) == chosen


def test_the_step_of_fictitious_play() -> None:
    """The first one is 1 / delay: against (0.9, 0.1) and without aversion both answer with stag."""
    start = [np.array([0.9, 0.1])] * 2
    found = fictitious_play([STAG, STAG.T], start, RiskAversion(gamma=0.0, floor=0.0, delay=4), 1)
    assert found[0] == pytest.approx([0.925, 0.075])


def test_gains_of_new_policies_by_hand() -> None:
    """Stag alone, then hare too: hare's 3 against stag's 4 is a quarter less; a variance of 2 within pairs costs 1 more."""
    old = Meta(([], []), (STAG[:1, :1], STAG.T[:1, :1]), (np.zeros((1, 1)),) * 2, [np.ones(1)] * 2)
    noise = np.array([[0.0, 0.0], [2.0, 2.0]])
    new = Meta(([], []), (STAG, STAG.T), (np.zeros((2, 2)), noise), [np.full(2, 0.5)] * 2)
    assert gains(old, new, DrivingGame(gamma=0.5)) == pytest.approx([-0.25, -0.5])


def test_averse_drivers_crash_less_for_less_progress() -> None:
    neutral, averse = (run(DrivingGame.model_validate({**SMALL, "gamma": gamma})) for gamma in (0.0, 0.5))
    assert averse["crashes_unseen"] < 0.5 * neutral["crashes_unseen"]
    assert averse["spread"] < neutral["spread"]
    assert averse["return"] < neutral["return"]
    assert averse == run(DrivingGame.model_validate({**SMALL, "gamma": 0.5}))


def test_mixtures_are_equilibria_of_the_meta_game() -> None:
    settings = DrivingGame.model_validate({**SMALL, "rounds": 3, "gamma": 0.02, "iterations": 2000, "least_gain": 0.0})
    meta, rounds = learn(settings)
    assert {len(policies) for policies in meta.policies} == {rounds + 1}
    assert all(weights.sum() == pytest.approx(1.0) for weights in meta.mixtures)
    even = [np.full(rounds + 1, 1 / (rounds + 1))] * 2
    assert exploitability(meta.means, meta.mixtures, settings, meta.spreads) < 0.5
    assert exploitability(meta.means, even, settings, meta.spreads) > 1.0


def test_small_gains_end_the_rounds() -> None:
    assert run(DrivingGame.model_validate({**SMALL, "least_gain": 1e6}))["rounds"] == 1.0


def test_selected_policies_drive_alone() -> None:
    """The mixture's variance of returns is not used, so that figures differ; mean is mean_variance without aversion."""
    found = {select: run(DrivingGame.model_validate({**SMALL, "select": select})) for select in ("none", "mean", "mean_variance")}
    assert found["mean_variance"]["spread"] <= found["mean"]["spread"]
    assert len({tuple(one.values()) for one in found.values()}) >= 2


def test_unseen_drivers_accelerate() -> None:
    assert aggressive(np.zeros(3, np.int64), np.random.default_rng(0)).tolist() == [ACCELERATE] * 3


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**SMALL, "rounds": 1, "oracle_updates": 5, "seed": 3}
    settings, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    settings.write_text(yaml.safe_dump(values))
    monkeypatch.setattr("sys.argv", ["psro", "--settings", str(settings), "--result", str(result)])
    assert psro.main() == 0
    expected = {f"control.{name}": value for name, value in run(DrivingGame.model_validate(values)).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"floor": 0.3}, "floor 0.3 is too much for 5 policies; lower it to at most 0.2"),
        ({"unit_payoffs": True}, "unit_payoffs has no effect here"),
        ({"entropy": 0.1}, "entropy has no effect here"),
        ({"level": 20.0}, "level has no effect here"),
        ({"select": "mean_variance", "gamma": 0.0}, "select: mean_variance is select: mean with gamma 0"),
        ({"deviants": "polite"}, "Input should be 'random' or 'aggressive'"),
        ({"deviants": "aggressive", "deviating": 0.0}, "deviants has no effect: it needs deviating above 0"),
        ({"meta_episodes": 1}, "greater than or equal to 2"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DrivingGame.model_validate(values)
