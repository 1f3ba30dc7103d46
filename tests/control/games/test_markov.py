"""Matrix and Markov games: equilibria by hand and against nashpy, exploitability, learners."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from stages.control.games.goofspiel import Game, run
from stages.control.games.markov import exploitability, matrix_game, order, solve, stage_game
from stages.control.games.risk_averse import exploitability as risk_averse_exploitability
from stages.control.games.settings import Goofspiel, RiskAversion


def test_matrix_games_by_hand() -> None:
    """Matching pennies: 0 at (1/2, 1/2). [[2, -1], [-1, 1]]: mixing with 2/5 makes both columns pay 1/5. A saddle point."""
    value, row, column = matrix_game(np.array([[1.0, -1.0], [-1.0, 1.0]]))
    assert (value, *row, *column) == pytest.approx((0.0, 0.5, 0.5, 0.5, 0.5))
    value, row, column = matrix_game(np.array([[2.0, -1.0], [-1.0, 1.0]]))
    assert (value, *row, *column) == pytest.approx((0.2, 0.4, 0.6, 0.4, 0.6))
    value, row, column = matrix_game(np.array([[3.0, 2.0], [1.0, 0.0]]))
    assert (value, *row, *column) == pytest.approx((2.0, 1.0, 0.0, 0.0, 1.0))


def test_matrix_games_as_nashpy_solves_them() -> None:
    nashpy = pytest.importorskip("nashpy")
    rng = np.random.default_rng(0)
    for shape in ((2, 2), (3, 4), (4, 3)):
        table = rng.normal(size=shape)
        theirs = nashpy.Game(table)
        row, column = theirs.linear_program()
        value, ours, _ = matrix_game(table)
        assert value == pytest.approx(float(row @ table @ column), abs=1e-8)
        assert np.allclose(ours, row, atol=1e-6)


def test_equilibria_of_nashpy_can_not_be_exploited() -> None:
    """General-sum games, by the measure of the risk-averse learners without risk aversion; other strategies can."""
    nashpy = pytest.importorskip("nashpy")
    plain = RiskAversion(gamma=0.0, floor=0.0)
    rng = np.random.default_rng(1)
    for _ in range(3):
        tables = [rng.normal(size=(3, 3)) for _ in range(2)]
        found = list(nashpy.Game(*tables).support_enumeration())
        assert found
        for equilibrium in found:
            assert risk_averse_exploitability(tables, equilibrium, plain) == pytest.approx(0.0, abs=1e-8)
        assert risk_averse_exploitability(tables, [np.eye(3)[0], np.full(3, 1 / 3)], plain) > 1e-3


def test_every_state_of_a_markov_game_as_nashpy_solves_it() -> None:
    nashpy = pytest.importorskip("nashpy")
    game = Game(3, handicap=1)
    solution = solve(game)
    for state in order(game):
        table = stage_game(game, state, solution.values)
        if min(table.shape) > 1:
            row, column = nashpy.Game(table).linear_program()
            assert solution.values[state] == pytest.approx(float(row @ table @ column), abs=1e-8)


def test_goofspiel_by_hand() -> None:
    """Equal hands: 0. Two cards, of which the row player's 2 is worth 0: it has 0 and 1 against 1 and 2. For the prize 2 the
    matrix game is [[-3, -2], [-1, -3]], for the prize 1 [[-3, -1], [-2, -3]]; both have the value -7/3."""
    equal, weak = Game(2), Game(2, handicap=1)
    assert sum(chance * solve(equal).values[state] for chance, state in equal.start()) == pytest.approx(0.0)
    assert weak.hand == (0, 1)
    solution, high, low = solve(weak), ((0, 1), (1, 2), (1,), 2), ((0, 1), (1, 2), (2,), 1)
    assert stage_game(weak, high, solution.values).tolist() == [[-3.0, -2.0], [-1.0, -3.0]]
    assert stage_game(weak, low, solution.values).tolist() == [[-3.0, -1.0], [-2.0, -3.0]]
    assert (solution.values[high], solution.values[low]) == pytest.approx((-7 / 3, -7 / 3))


def test_equilibria_are_not_exploitable_and_uniform_play_is() -> None:
    game = Game(3)
    solution = solve(game)
    assert exploitability(game, solution.rows, solution.columns) == pytest.approx(0.0, abs=1e-8)
    uniform = {state: np.full(game.actions(state)[0], 1.0 / game.actions(state)[0]) for state in order(game)}
    assert exploitability(game, uniform, uniform) > 1.0


def test_minimax_q_finds_the_values_that_independent_learners_miss() -> None:
    """Both equilibria of this game are mixed, so greedy actions can be exploited."""
    minimax = run(Goofspiel(cards=2, handicap=1, sweeps=150))
    independent = run(Goofspiel(cards=2, handicap=1, learner="independent_q", sweeps=150))
    assert minimax["value"] == pytest.approx(-7 / 3)
    assert minimax["value_error"] < 0.1
    assert minimax["exploitability"] < 0.2
    assert independent["exploitability"] > 0.2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cards": 2, "handicap": 3}, "handicap 3 is more than the 2 cards"),
        ({"exploration": 0.5}, "no effect with learner: minimax_q"),
        ({"rate_power": 0.4}, "greater than 0.5"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Goofspiel.model_validate(values)
