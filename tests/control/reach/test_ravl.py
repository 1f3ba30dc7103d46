"""RAVL: the edge of reach by hand, errors that spread from it, what repairs learning, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from stages.control.reach import ravl
from stages.control.reach.ravl import (
    Rollouts,
    combined,
    first_values,
    learn,
    moves,
    optimal_values,
    policy_values,
    predicted,
    predicted_rewards,
    roll_out,
    run,
)
from stages.control.reach.settings import Reach


def test_the_edge_is_the_last_successor_alone() -> None:
    """Rollouts of 5 steps from states 0 to 5 train states 0 to 9 and use the value of state 10."""
    rollouts = roll_out(Reach())
    assert rollouts.state.shape == (2000, 5)
    assert np.flatnonzero(rollouts.trained(31).all(1)).tolist() == list(range(10))
    assert np.flatnonzero(rollouts.edge(31)).tolist() == [10]
    assert (np.argwhere(rollouts.following == 10)[:, 1] == 4).all()


def test_one_target_by_hand() -> None:
    """The next state is never trained: its members' values 1, 3, 2 are combined to 1 or 2, or to 4 / 3, the mean over the pairs'
    smaller values 1, 1 and 2; r is -1 and gamma 0.99."""
    one_step = Rollouts(np.array([[0]]), np.array([[1]]), np.array([[1]]))
    values = np.zeros((3, 2, 2))
    values[:, 1] = np.array([1.0, 3.0, 2.0])[:, None]
    for aggregate, ahead in (("min", 1.0), ("mean", 2.0), ("min_of_2", (1.0 + 1.0 + 2.0) / 3)):
        expected = -1 + 0.99 * ahead
        settings = Reach(states=2, goal=0, covered=1, penalty=1.0, gamma=0.99, critics=3, aggregate=aggregate)
        assert learn(settings, one_step, values)[0, 1] == pytest.approx(expected)


def test_an_error_at_the_edge_reaches_back() -> None:
    """10 too much at the edge is 10 * 0.99^5 = 9.5099 too much five steps earlier."""
    settings = Reach(states=7, goal=6, covered=1, gamma=0.99, critics=1, penalty=0.01)
    forward = Rollouts(np.arange(5)[None], np.ones((1, 5), int), np.arange(1, 6)[None])
    values = np.full((1, 7, 2), -100.0)
    values[:, 5] = 0.0
    wrong = values.copy()
    wrong[:, 5] = 10.0
    error = learn(settings, forward, wrong)[0, 1] - learn(settings, forward, values)[0, 1]
    assert error == pytest.approx(9.5099, abs=1e-4)


@pytest.mark.parametrize(("critics", "expected"), [(1, 0.0), (2, -0.564), (10, -1.539)])
def test_pessimism_where_there_are_no_data(critics: int, expected: float) -> None:
    values = first_values(Reach(critics=critics, spread=1.0, states=10_000))
    assert combined(values, "min").mean() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("critics", [2, 10])
def test_the_smaller_of_two_members_is_as_pessimistic_as_two_critics(critics: int) -> None:
    """Whatever the number of members: -0.564 on average, and with two of them the minimum itself."""
    values = first_values(Reach(critics=critics, spread=1.0, states=10_000))
    assert combined(values, "min_of_2").mean() == pytest.approx(-0.564, abs=0.02)
    pairs = [np.minimum(values[one], values[other]) for one in range(critics) for other in range(one)]
    assert np.allclose(combined(values, "min_of_2"), np.mean(pairs, 0))


def test_critics_differ_at_the_edge_alone() -> None:
    """What is trained has the same target for all; state 10 keeps the first values."""
    settings = Reach(critics=4, seed=2)
    found = run(settings)
    assert found["disagreement_inner"] == 0.0
    assert found["disagreement_edge"] == pytest.approx(first_values(settings)[:, 10].std(0).mean())
    assert run(Reach(critics=4, length=100))["disagreement_edge"] == 0.0


def test_true_values_by_hand() -> None:
    """Beside the goal one steps onto it and off it: 0, -p, 0, ... discounted."""
    settings = Reach(penalty=0.5, gamma=0.9)
    off = -0.5 / (1 - 0.81)
    assert optimal_values(settings)[[2, 3, 4]] == pytest.approx([0.9 * off, off, 0.9 * off])
    assert policy_values(settings, np.zeros(31, int))[0] == pytest.approx(-0.5 * 3 / 0.1)


@pytest.fixture(scope="module")
def means() -> dict[str, dict[str, float]]:
    """Mean figures over 20 seeds of each arm."""
    arms = {
        "one": {"critics": 1},
        "two": {"critics": 2},
        "ten": {"critics": 10},
        "ten_cheap": {"critics": 10, "penalty": 0.1},
        "mean_of_ten_cheap": {"critics": 10, "penalty": 0.1, "aggregate": "mean"},
        "patched": {"critics": 1, "true_edge_values": True},
        "long": {"critics": 1, "length": 60},
    }
    found = {name: [run(Reach.model_validate({**arm, "seed": seed})) for seed in range(20)] for name, arm in arms.items()}
    return {name: {key: fmean(figures[key] for figures in runs) for key in runs[0]} for name, runs in found.items()}


def test_pessimism_repairs_what_a_thousandth_of_the_targets_breaks(means: dict[str, dict[str, float]]) -> None:
    assert means["one"]["edge_targets"] < 0.002
    assert means["one"]["leaves"] > 0.4
    assert means["one"]["overestimation"] > means["two"]["overestimation"] > 1.0
    assert means["one"]["return"] < means["two"]["return"] < means["ten"]["return"]
    assert means["ten"]["suboptimality"] < 0.2


def test_the_mean_of_an_ensemble_is_not_pessimistic(means: dict[str, dict[str, float]]) -> None:
    """Where the way to the edge costs little."""
    assert means["mean_of_ten_cheap"]["suboptimality"] > 1.0
    assert means["ten_cheap"]["suboptimality"] < 0.2


@pytest.mark.parametrize("arm", ["patched", "long"])
def test_true_values_at_the_edge_or_no_edge_repair_it_too(arm: str, means: dict[str, dict[str, float]]) -> None:
    """With a perfect model and one critic: the edge alone does the harm."""
    assert means[arm]["suboptimality"] == pytest.approx(0.0, abs=1e-6)
    assert means[arm]["overestimation"] == pytest.approx(0.0, abs=1e-6)


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    settings.write_text(yaml.safe_dump({"critics": 2, "seed": 3}))
    monkeypatch.setattr("sys.argv", ["ravl", "--settings", str(settings), "--result", str(result)])
    assert ravl.main() == 0
    expected = {f"control.{name}": value for name, value in run(Reach(critics=2, seed=3)).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"goal": 31}, "goal 31 is more than 30"),
        ({"covered": 40}, "covered 40 is more than 31"),
        ({"critics": 1, "aggregate": "mean"}, "aggregate mean has no effect with critics: 1"),
        ({"critics": 1, "aggregate": "min_of_2"}, "aggregate min_of_2 has no effect with critics: 1"),
        ({"aggregate": "median"}, "Input should be 'min', 'mean' or 'min_of_2'"),
        ({"length": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Reach.model_validate(values)


def test_an_ensemble_that_knows_every_move_changes_nothing() -> None:
    """The paper's case: without disagreement, its penalty is none."""
    for critics in (1, 10):
        models = {"generalises": 1.0, "uncertainty": 5.0}
        assert run(Reach.model_validate({"critics": critics, "models": models})) == pytest.approx(run(Reach(critics=critics)))


def test_members_agree_on_the_data_and_their_disagreement_is_subtracted() -> None:
    """Two members at states s + 1 and s - 1: the mean distance from the goal, less 3 standard deviations of 1."""
    settings = Reach.model_validate({"models": {"members": 50, "uncertainty": 3.0}})
    table, true = predicted(settings), moves(settings.states)
    assert (table[:, : settings.covered] == true[: settings.covered]).all()
    assert (table[:, settings.covered :].std(0) > 0).all()
    assert (np.abs(table - np.arange(settings.states)[:, None]) <= 1).all()
    two = np.tile(np.arange(settings.states)[:, None], (1, 2))[None] + np.array([1, -1])[:, None, None]
    assert predicted_rewards(settings, two)[10].tolist() == pytest.approx([-0.2 * 7 - 3.0] * 2)
    known = predicted(Reach.model_validate({"models": {"members": 400, "generalises": 0.7}}))
    assert (known[:, settings.covered :] == true[settings.covered :]).mean() == pytest.approx(0.8, abs=0.02)  # a guess in three


def test_a_penalty_repairs_poor_models_and_pessimism_good_ones() -> None:
    def returned(critics: int, models: dict[str, float]) -> float:
        runs = [run(Reach.model_validate({"seed": seed, "critics": critics, "models": models})) for seed in range(8)]
        return float(np.mean([one["return"] for one in runs]))

    best = run(Reach())["return"]
    assert returned(1, {"generalises": 0.5, "uncertainty": 5.0}) == pytest.approx(best)
    assert returned(1, {"generalises": 0.9, "uncertainty": 5.0}) < best - 1.0
    assert returned(10, {"generalises": 0.9}) == pytest.approx(best)
