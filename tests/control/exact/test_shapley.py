from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stages.control.exact.contributions import cluster_error, contributions, main, parse_coalitions, team_coalitions
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
    assert found.players["a"].mean == pytest.approx(0.375)
    assert found.players["b"].mean == pytest.approx(0.625)
    assert found.players["a"].low < 0.375 < found.players["a"].high
    assert (found.gain.mean, found.error, found.share("a")) == (1.0, 0.0, pytest.approx(0.375))
    rows(RATES).to_parquet(tmp_path / "rows.parquet")
    assert main([str(tmp_path / "rows.parquet"), *TEAM]) == 0
    printed = capsys.readouterr().out
    assert "| shop | a | +37.5 |" in printed
    assert "| 38 % | 4 |" in printed
    assert "| shop | all together | +100.0 | +100.0 to +100.0 | – | 4 |" in printed


def test_shares_need_a_gain_of_more_than_three_standard_errors() -> None:
    """By hand: gains of 1, 1, 1 and 0 on four clusters have a mean of 3/4 and, of variance 1/4, a standard error of 1/4. The mean
    of 16 such tasks, three in four, has one of sqrt(3/16 / 15)."""
    players, models = parse_coalitions(TEAM)
    for repeats, error in ((1, 1 / 4), (4, (3 / 16 / 15) ** 0.5)):
        rates = {"sft": [0, 0, 0, 0], "rl@a": [1, 0, 0, 0], "rl@b": [0, 1, 1, 0], "merged": [1, 1, 1, 0]}
        found = contributions(rows({model: of * repeats for model, of in rates.items()}), players, models)["shop"]
        assert found.gain.mean == 0.75
        assert found.error == pytest.approx(error)
        assert found.share("b") == (None if repeats == 1 else pytest.approx(2 / 3))


def test_errors_are_over_clusters_by_hand() -> None:
    """Sums of 2, 1 and 0 over clusters of 2, 1 and 1 tasks, mean 3/4: deviations 0.5, 0.25 and -0.75."""
    found = cluster_error(np.array([1.0, 1.0, 1.0, 0.0]), ["a", "a", "b", "c"])
    assert found == pytest.approx((3 / 2 * (0.25 + 0.0625 + 0.5625)) ** 0.5 / 4)


def test_contributions_of_roles_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The coalitions are found by their names: the solver alone solves one task of four, with the planner three; nobody acts
    without it."""
    team = {"rl@x": [1, 1, 1, 0], "rl@x[]": [0] * 4, "rl@x[planner]": [0] * 4, "rl@x[solver]": [1, 0, 0, 0], "sft": [1] * 4}
    players, models = team_coalitions(list(team), "rl@x")
    assert (players, models) == (["planner", "solver"], ["rl@x[]", "rl@x[planner]", "rl@x[solver]", "rl@x"])
    found = contributions(rows(team), players, models)["shop"].players
    assert (found["planner"].mean, found["solver"].mean) == (0.25, 0.5)
    rows(team).to_parquet(tmp_path / "rows.parquet")
    assert main([str(tmp_path / "rows.parquet"), "--team", "rl@x", "--method", "banzhaf"]) == 0
    assert "| shop | planner | +25.0 |" in capsys.readouterr().out  # equal for two players
    with pytest.raises(CoalitionError, match=r"coalition \(empty\) has no model.*run `dvc repro evaluate` again"):
        team_coalitions([name for name in team if name != "rl@x[]"], "rl@x")
    with pytest.raises(CoalitionError, match=r"no coalitions of sft: set evaluate\.attribution"):
        team_coalitions(list(team), "sft")


def test_banzhaf_values_by_hand() -> None:
    """Gloves: values 1/4, 1/4 and 3/4 do not sum to the pair's worth."""
    names = ["=n", "a=a", "b=b", "a+b=ab", "c=c", "a+c=ac", "b+c=bc", "a+b+c=abc"]
    players, models = parse_coalitions(names)
    worth = {model: [int(value)] * 2 for model, value in zip(models, GLOVES, strict=True)}
    found = contributions(rows(worth), players, models, "banzhaf")["shop"].players
    assert [found[player].mean for player in players] == [0.25, 0.25, 0.75]


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
