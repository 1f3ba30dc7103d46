"""Measures of judges, by hand and by what the planted faults must cause."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from stages.judging.contract import Candidate, Question, Rubric
from stages.judging.measures import (
    brier_score,
    calibration,
    cohen_kappa,
    flip_rate,
    krippendorff_alpha,
    order_measures,
    rank_correlation,
    tie_rate,
    verdict,
)
from stages.judging.orders import Match, play
from stages.judging.preferences import margins_of
from stages.judging.program import ProgramJudge
from stages.judging.settings import Principle, PrincipleSampling, ProgramFaults
from stages.judging.table import judgment_row, write_judgments
from stages.records.episode import read_rows


def test_kappa_by_hand() -> None:
    """20 of 50 both yes, 15 both no, 5 and 10 apart: (0.7 - 0.5) / (1 - 0.5) = 0.4."""
    one = ["y"] * 25 + ["n"] * 25
    other = ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15
    assert cohen_kappa(one, other) == pytest.approx(0.4)
    assert cohen_kappa(["y"], ["y"]) == 1.0
    assert cohen_kappa([1, 2, 3], [1, 2, 2], "quadratic") == pytest.approx(2 / 3), "1 - (1/3) / 1"
    for pair in ((["y"], []), ([], [])):
        with pytest.raises(ValueError, match="same items"):
            cohen_kappa(*pair)


def test_alpha_by_hand() -> None:
    """Two raters, ten items, two disagreements on binary labels: 1 - (n - 1) sum o / (n_0 n_1)."""
    pytest.importorskip("krippendorff")
    one, other = [0, 1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]
    assert krippendorff_alpha([one, other]) == pytest.approx(0.095, abs=1e-3)
    assert krippendorff_alpha([[1, None], [1, 1]]) == 1.0


def test_flips_and_ties() -> None:
    assert [verdict(2, 1), verdict(1, 2), verdict(1, 1)] == [1, -1, 0]
    assert flip_rate([(2, 1), (2, 1), (1, 1), (1, 2)], [(2, 1), (1, 2), (2, 1), (1, 2)]) == 0.5
    assert tie_rate([(1, 1), (2, 1)]) == 0.5
    assert flip_rate([], []) == tie_rate([]) == 0.0


def test_calibration_by_hand() -> None:
    error, rows = calibration([0.05, 0.05, 0.95, 0.95], [0, 1, 1, 1])
    assert error == pytest.approx((0.45 * 2 + 0.05 * 2) / 4)
    assert [row["count"] for row in rows] == [2, 2]
    assert brier_score([0.5, 1.0], [1, 1]) == pytest.approx(0.125)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        calibration([1.2], [1])


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert rank_correlation([1, 1], [1, 2]) is None


@pytest.mark.parametrize(("bias", "flips"), [(0.0, 0.0), (3.0, 1.0)])
def test_planted_position_bias_is_found(bias: float, flips: float) -> None:
    rng = Random(0)
    qualities = {f"c{number}": rng.uniform(-1, 1) for number in range(20)}
    names = sorted(qualities)
    judge = ProgramJudge(ProgramFaults(noise=0.0, position=bias), lambda question, one: qualities[one.name], 0)
    pairs = [(rng.choice(names), rng.choice(names)) for _ in range(40)]
    matches = [
        Match(f"t{number}", "", Candidate(one, name=one), Candidate(other, name=other), Rubric())
        for number, (one, other) in enumerate(pairs)
        if one != other
    ]
    _, asked = play(judge, matches)
    found = order_measures([judgment_row(judge, question, judgment) for question, judgment in asked])
    assert found["pairs"] == len(matches)
    assert found["position_bias"] == pytest.approx(bias)
    assert found["flip_rate"] == flips
    assert found["failures"] == 0.0


def test_each_principle_of_a_pair_is_measured(tmp_path: Path) -> None:
    """Contract: one pair judged by three principles is three verdicts, and the table says by which. The first tells the answers
    apart by more than the bias, the others don't, so that two of three depend on the order."""
    principles = [Principle(name=name, text=name, negative=f"not {name}") for name in ("a", "b", "c")]

    def quality(question: Question, one: Candidate) -> float:
        return float(one.name == "x" and question.rubric.principles == ("a",))

    judge = ProgramJudge(ProgramFaults(noise=0.0, position=0.1), quality, 0)
    pair = Question("pairwise", "t", "", (Candidate("one", name="x"), Candidate("other", name="y")))
    _, asked = margins_of(judge, [pair], PrincipleSampling(items=principles))
    rows = [judgment_row(judge, *one) for one in asked]
    found = order_measures(rows)
    assert (found["pairs"], found["flip_rate"], found["tie_rate"]) == (3.0, 2 / 3, 2 / 3)
    assert found["position_bias"] == pytest.approx(0.1)
    write_judgments(tmp_path / "table.parquet", rows)
    assert [row["principles"] for row in read_rows(tmp_path / "table.parquet")].count(["b"]) == 2
