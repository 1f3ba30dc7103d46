from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stages.control.exact.contributions import contributions, main, parse_coalitions
from stages.control.exact.shapley import CoalitionError, shapley

GLOVES = np.array([0, 0, 0, 0, 0, 1, 1, 1.0])
"""Players 0 and 1 own a left glove, 2 a right one; a pair is worth 1."""


@pytest.mark.parametrize(("empty", "expected"), [(0, (20, 30)), (-5, (22.5, 32.5))])
def test_two_players_by_hand(empty: float, expected: tuple[float, float]) -> None:
    values = np.array([empty, 10, 20, 50.0])
    assert shapley(values) == pytest.approx(expected)


def test_unanimity_and_gloves_by_hand() -> None:
    unanimity = np.array([0, 0, 0, 0, 0, 0, 0, 1.0])
    assert shapley(unanimity) == pytest.approx([1 / 3] * 3)
    assert shapley(GLOVES) == pytest.approx([1 / 6, 1 / 6, 2 / 3])


def test_subset_formula_is_the_mean_over_all_orders() -> None:
    values = np.random.default_rng(0).normal(size=16)
    total = np.zeros(4)
    for order in permutations(range(4)):
        joined = 0
        for player in order:
            total[player] += values[joined | 1 << player] - values[joined]
            joined |= 1 << player
    assert shapley(values) == pytest.approx(total / 24, abs=1e-12)


def test_player_in_an_additive_game_gets_its_own_worth_and_a_dummy_nothing() -> None:
    worth = np.array([3.0, 0.0, -1.5])
    values = np.array([sum(worth[i] for i in range(3) if c >> i & 1) for c in range(8)])
    assert shapley(values) == pytest.approx(worth)
    assert shapley(values)[1] == 0


def test_relabelling_players_permutes_the_values() -> None:
    values = np.random.default_rng(1).normal(size=8)
    swapped = values[[0, 2, 1, 3, 4, 6, 5, 7]]
    assert shapley(swapped) == pytest.approx(shapley(values)[[1, 0, 2]])


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros(1), np.zeros(0), np.array([0, np.nan])])
def test_tables_of_no_team_are_refused(values: np.ndarray) -> None:
    with pytest.raises(CoalitionError):
        shapley(values)


def rows(successes: dict[str, list[int]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"model": model, "domain": "shop", "task_id": f"t{i}", "cluster": f"t{i}", "panel": "p", "success": bool(success)}
            for model, of in successes.items()
            for i, success in enumerate(of)
        ]
    )


TEAM = ["=sft", "a=rl@a", "b=rl@b", "b+a=merged"]
RATES = {"sft": [0, 0, 0, 0], "rl@a": [1, 0, 0, 0], "rl@b": [0, 1, 1, 0], "merged": [1, 1, 1, 1]}


def test_contributions_to_a_merge_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    players, models = parse_coalitions(TEAM)
    assert (players, models) == (["a", "b"], ["sft", "rl@a", "rl@b", "merged"])
    found = contributions(rows(RATES), players, models)["shop"]
    assert found["a"].mean == pytest.approx(0.375)
    assert found["b"].mean == pytest.approx(0.625)
    assert found["a"].low < 0.375 < found["a"].high
    rows(RATES).to_parquet(tmp_path / "rows.parquet")
    assert main([str(tmp_path / "rows.parquet"), *TEAM]) == 0
    assert "| shop | a | +37.5 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("team", "words"),
    [
        (TEAM[:3], "coalition a+b has no model"),
        (TEAM[1:], "coalition (empty) has no model"),
        ([*TEAM, "a+b=merged"], "given twice"),
        (["=sft"], "name 0 players"),
        (["a"], "not of the form"),
        ([*TEAM[:3], "a+b=lost"], "model lost was not evaluated"),
    ],
)
def test_incomplete_teams_are_refused(team: list[str], words: str) -> None:
    with pytest.raises(CoalitionError) as caught:
        contributions(rows(RATES), *parse_coalitions(team))
    assert words in str(caught.value)


def test_models_with_different_tasks_are_refused() -> None:
    with pytest.raises(CoalitionError, match="different tasks"):
        contributions(rows(RATES | {"merged": [1, 1]}), *parse_coalitions(TEAM))


def test_a_file_that_is_no_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.parquet").write_text("no table")
    assert main([str(tmp_path / "rows.parquet"), *TEAM]) == 1
    assert "dvc repro evaluate" in capsys.readouterr().err
