"""The pursuit by hand, contributions of its players, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from stages.control.pursuit import contributions
from stages.control.pursuit.contributions import details, rank_correlation, run
from stages.control.pursuit.settings import Pursuit
from stages.control.pursuit.world import CATCH, MOVES, chase, flee, replacement, team_returns


def test_predators_shorten_the_longer_distance() -> None:
    predators, prey = np.array([[[0, 0], [5, 5], [3, 8], [4, 4]]]), np.array([[4, 5]])
    draw = np.full((1, 4), 0.2)
    assert chase(predators, prey, draw)[0].tolist() == [[0, 1], [-1, 0], [0, -1], [0, 1]]
    tied = np.array([[[2, 3]]])
    found = [chase(tied, prey, np.full((1, 1), value))[0, 0].tolist() for value in (0.4, 0.6)]
    assert found == [[0, 1], [1, 0]]


def test_the_prey_flees_from_the_nearest_predator() -> None:
    draw = np.zeros((1, 5))
    assert flee(np.array([[[2, 2]]]), np.array([[3, 2]]), 12, draw).tolist() == [[4, 2]]
    cornered = flee(np.array([[[1, 1]]]), np.array([[0, 0]]), 2, draw)
    assert cornered.tolist() == [[0, 0]]


def test_replacements() -> None:
    wanted = np.array([[[1, 0], [0, 1], [0, -1]]])
    draw = np.array([[0.0, 0.5, 0.99]])
    assert not replacement("noop", wanted, draw, draw).any()
    assert replacement("random", wanted, draw, draw)[0].tolist() == MOVES[[0, 2, 4]].tolist()
    others = replacement("random_player", wanted, draw, np.array([[0.1, 0.6, 0.6]]))
    assert others[0].tolist() == [[0, 1], [1, 0], [0, 1]]  # each another one's move


def test_returns_count_catches_on_the_same_draws() -> None:
    settings = Pursuit(steps=5, size=6)
    found = team_returns(settings, 0b111, 400, "test")
    assert np.array_equal(found, team_returns(settings, 0b111, 400, "test"))
    assert np.array_equal(np.unique(found % CATCH), [0.0])
    longer = team_returns(settings.model_copy(update={"steps": 10}), 0b111, 400, "test")
    assert (longer >= found).all()
    assert found.mean() > team_returns(settings, 0b001, 400, "test").mean()


def test_faster_predators_contribute_more() -> None:
    found = run(Pursuit(seed=7, episodes=100))
    assert found["player_0"] < found["player_1"] < found["player_2"]
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert found["efficiency_gap"] == pytest.approx(0.0, abs=1e-9)
    assert found["evaluations"] == 8


@pytest.mark.parametrize(("kind", "is_zero"), [("noop", True), ("random", False)])
def test_a_predator_that_stays_is_worth_nothing_against_staying(kind: str, is_zero: bool) -> None:
    found = run(Pursuit.model_validate({"seed": 7, "switched_off": 2, "replacement": kind, "episodes": 50}))
    assert (found["switched_off"] == 0.0) == is_zero
    assert abs(found["player_2"]) == found["switched_off"]


def test_a_predator_that_is_switched_off_is_copied_staying() -> None:
    """Contract: random_player does what another one would do, and predator 1 would stay. Of two, the other one is copied: outside
    the coalition of predator 1, predator 0 stays, as with noop; outside that of predator 0, predator 1 chases."""
    values = {"seed": 7, "speeds": [1.0, 1.0], "switched_off": 1}
    staying, copying = (Pursuit.model_validate({**values, "replacement": kind}) for kind in ("noop", "random_player"))

    def returns(settings: Pursuit, coalition: int) -> np.ndarray:
        return team_returns(settings, coalition, 200, "test")

    assert np.array_equal(returns(copying, 0b10), returns(staying, 0b10))
    assert returns(copying, 0b01).mean() > returns(staying, 0b01).mean()


def test_sampled_contributions_are_near_the_exact_ones() -> None:
    exact = run(Pursuit(seed=7, episodes=100))
    for values in ({"estimator": "permutation"}, {"estimator": "permutation", "antithetic": True}):
        found = run(Pursuit.model_validate({"seed": 7, "samples": 20, **values}))
        assert found["evaluations"] == 20 * 4 * (2 if "antithetic" in values else 1)
        for player in range(3):
            assert abs(found[f"player_{player}"] - exact[f"player_{player}"]) < 5 * (found["standard_error"] + 1.0)


def test_some_predators_are_players_and_the_others_always_chase() -> None:
    """Contract: of one player, the contribution is what it adds to the others, exactly; two leave the third in all coalitions."""
    values = {"seed": 7, "episodes": 50}
    found = run(Pursuit.model_validate({**values, "players": [2]}))
    settings = Pursuit(**values)
    added = team_returns(settings, 0b111, 50, "exact") - team_returns(settings, 0b011, 50, "exact")
    assert (found["player_2"], found["team"]) == pytest.approx((added.mean(), added.mean()))
    assert found["evaluations"] == 2
    pair = run(Pursuit.model_validate({**values, "players": [2, 0]}))
    whole, none, fast, slow = (team_returns(settings, team, 50, "exact").mean() for team in (0b111, 0b010, 0b110, 0b011))
    assert pair["player_2"] == pytest.approx((fast - none + whole - slow) / 2)
    assert pair["player_0"] == pytest.approx((slow - none + whole - fast) / 2)
    assert "player_1" not in pair
    assert run(Pursuit.model_validate({**values, "players": [0, 2], "switched_off": 1}))["switched_off"] == 0.0


@pytest.mark.parametrize("estimator", ["exact", "permutation"])
def test_coalitions_share_their_draws_or_have_their_own(estimator: str) -> None:
    """A predator that stays contributes exactly 0 on common draws; on draws of its own every coalition's return has noise."""
    values: dict[str, Any] = {"seed": 7, "switched_off": 2, "estimator": estimator}
    values |= {"episodes": 50} if estimator == "exact" else {"samples": 20}
    common, own = (run(Pursuit.model_validate({**values, "common_random_numbers": common})) for common in (True, False))
    assert common["switched_off"] == 0.0
    assert own["switched_off"] > 0.0
    if estimator == "exact":
        assert own["efficiency_gap"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("estimator", ["permutation", "coalition_uniform"])
def test_cached_coalitions_are_played_once(estimator: str) -> None:
    """On the draws of exact: many orders then give exact's contributions, and the gap is 0 for orders."""
    values: dict[str, Any] = {"seed": 7, "episodes": 50}
    found = run(Pursuit.model_validate({**values, "estimator": estimator, "cache_coalitions": True, "samples": 400}))
    value = "shapley" if estimator == "permutation" else "banzhaf"
    exact = run(Pursuit.model_validate({**values, "value": value}))
    assert found["evaluations"] == 8
    assert found["team"] == exact["team"]
    for player in range(3):
        assert found[f"player_{player}"] == pytest.approx(exact[f"player_{player}"], abs=5 * found["standard_error"] + 1e-9)
    if estimator == "permutation":
        assert found["efficiency_gap"] == pytest.approx(0.0, abs=1e-9)


def test_shares_are_of_a_clear_gain() -> None:
    """Gains 9, 10 and 11: their mean has the error 1 / sqrt 3. Gains that are as often -10 as 10 are no gain."""
    found = details([0, 2], np.array([2.5, 7.5]), np.array([0.1, 0.2]), np.array([9.0, 10.0, 11.0]))
    assert found == pytest.approx({"error_0": 0.1, "error_2": 0.2, "share_0": 0.25, "share_2": 0.75})
    assert set(details([0], np.array([1.0]), np.array([0.1]), np.array([-10.0, 10.0]))) == {"error_0"}
    assert set(details([0], np.array([1.0]), np.array([0.1]), np.array([10.0]))) == {"error_0"}
    figures = run(Pursuit(seed=7, episodes=100, details=True))
    assert sum(figures[f"share_{player}"] for player in range(3)) == pytest.approx(1.0)
    assert np.mean([figures[f"error_{player}"] for player in range(3)]) == pytest.approx(figures["standard_error"])


def test_rank_correlations() -> None:
    assert rank_correlation(np.array([1.0, 5.0, 3.0]), np.array([0.1, 0.3, 0.2])) == pytest.approx(1.0)
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1.0)
    assert rank_correlation(np.array([1.0, 1.0]), np.array([1.0, 2.0])) == 0.0


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"episodes": 3, "steps": 4, "speeds": [1.0, 2.0], "value": "banzhaf"}
    settings, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    settings.write_text(yaml.safe_dump(values))
    monkeypatch.setattr("sys.argv", ["contributions", "--settings", str(settings), "--result", str(result)])
    assert contributions.main() == 0
    expected = {f"control.{name}": value for name, value in run(Pursuit.model_validate(values)).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speeds": [1.0], "replacement": "random_player"}, "replacement random_player needs another predator"),
        ({"speeds": [1.0, 2.0], "switched_off": 2}, "the predators are 0 to 1"),
        ({"speeds": [1.0] * 11}, "11 predators have 2048 coalitions; use estimator: permutation"),
        ({"episodes": 1}, "episodes 1: contributions of one have no standard error; raise it to two or more"),
        ({"estimator": "permutation", "samples": 1}, "samples 1: contributions of one have no standard error"),
        ({"samples": 7}, "samples has no effect: it needs a sampling estimator"),
        ({"estimator": "permutation", "episodes": 5}, "episodes has no effect: it needs estimator: exact, or cache_coalitions"),
        ({"cache_coalitions": True}, "cache_coalitions has no effect: it needs a sampling estimator"),
        ({"players": [0, 0]}, "players names a predator twice"),
        ({"players": [3]}, "players 3: the predators are 0 to 2"),
        ({"estimator": "coalition_uniform", "antithetic": True}, "antithetic has no effect: it needs estimator: permutation"),
        ({"speeds": [3.0]}, "less than or equal to 2"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Pursuit.model_validate(values)
