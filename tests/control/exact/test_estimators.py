"""Estimators of contributions against known values: tables by hand, bias and variance at equal cost, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from stages.control.exact import estimators
from stages.control.exact.estimators import run, table
from stages.control.exact.settings import CoalitionGame
from stages.control.exact.shapley import shapley
from stages.control.exact.shapley_sampling import banzhaf


def figures(**values: Any) -> dict[str, float]:
    return run(CoalitionGame.model_validate(values))


def test_tables_by_hand() -> None:
    assert table(CoalitionGame(game="unanimity", players=2)).tolist() == [0.0, 0.0, 0.0, 1.0]
    gloves = table(CoalitionGame(game="gloves", players=3))
    assert shapley(gloves) == pytest.approx([1 / 6, 1 / 6, 2 / 3])
    nearly = table(CoalitionGame(players=8))
    assert nearly[0] == 0.0
    alone = nearly[1 << np.arange(8)]
    rest = nearly - (np.arange(256)[:, None] >> np.arange(8) & 1) @ alone
    assert 0.05 < rest.std() < 0.5


def test_uniform_coalitions_are_biased_by_the_difference_to_banzhaf_values() -> None:
    """And more samples do not help: of five, unanimity is worth 1/5 each, and 1/16 by Banzhaf."""
    few, many = (figures(game="unanimity", estimator="coalition_uniform", budget=budget) for budget in (100, 1000))
    expected = (1 / 5 - 1 / 16) ** 2
    assert few["squared_bias"] == pytest.approx(expected, rel=0.2)
    assert many["squared_bias"] == pytest.approx(expected, rel=0.1)
    assert many["variance"] < 0.2 * few["variance"]
    values = table(CoalitionGame(game="unanimity"))
    assert ((shapley(values) - banzhaf(values)) ** 2).mean() == pytest.approx(expected)


def test_orders_are_unbiased_and_efficient() -> None:
    few, many = (figures(game="random", budget=budget) for budget in (120, 1200))
    for found in (few, many):
        assert abs(found["squared_bias"]) < 0.05 * found["squared_error"]
        assert found["efficiency_gap"] == pytest.approx(0.0, abs=1e-9)
    assert many["squared_error"] == pytest.approx(few["squared_error"] / 10, rel=0.3)
    assert (few["evaluations"], many["evaluations"]) == (120.0, 1200.0)


def test_reversed_orders_help_at_equal_cost_in_nearly_additive_games() -> None:
    plain, reversed_too = (figures(antithetic=antithetic) for antithetic in (False, True))
    assert plain["evaluations"] == reversed_too["evaluations"] == 120.0
    assert reversed_too["squared_error"] < plain["squared_error"]


def test_noise_adds_its_variance() -> None:
    """Two players, additive but for a tenth: an order's gain is the difference of two evaluations, whose noise has the variance
    2 noise^2; 40 orders divide it. The empty coalition's and the others' noise is independent."""
    silent, noisy = (figures(players=2, budget=120, noise=noise, repeats=400) for noise in (0.0, 1.0))
    assert noisy["variance"] - silent["variance"] == pytest.approx(2 / 40, rel=0.2)


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"players": 3, "repeats": 3, "seed": 4}
    settings, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    settings.write_text(yaml.safe_dump(values))
    monkeypatch.setattr("sys.argv", ["estimators", "--settings", str(settings), "--result", str(result)])
    assert estimators.main() == 0
    expected = {f"control.{name}": value for name, value in figures(**values).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"estimator": "coalition_uniform", "antithetic": True}, "antithetic has no effect: it needs estimator: permutation"),
        ({"budget": 5}, "budget 5 is not enough for one sample of 5 players; raise it"),
        ({"players": 1}, "greater than or equal to 2"),
        ({"game": "chess"}, "Input should be 'nearly_additive'"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CoalitionGame.model_validate(values)
