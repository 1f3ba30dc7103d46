"""How learning curves are compared, by hand."""

from __future__ import annotations

import pytest

from tests.control.learning_curves import assert_curves_agree, differences


def test_areas_and_ends_are_compared_by_students_interval() -> None:
    """Three runs of two evaluations each: areas 2, 3, 4 and 2, 2, 5, ends 3, 4, 5 and 4, 4, 4; the 99 % quantile of t with four
    degrees of freedom is 4.604."""
    ours, theirs = [[1.0, 3.0], [2.0, 4.0], [3.0, 5.0]], [[0.0, 4.0], [0.0, 4.0], [6.0, 4.0]]
    found = differences(ours, theirs)
    assert found["area"] == (pytest.approx(0.0), pytest.approx(4.604 * ((1 + 3) / 3) ** 0.5, abs=1e-3))
    assert found["end"] == (pytest.approx(0.0), pytest.approx(4.604 * (1 / 3) ** 0.5, abs=1e-3))


def test_curves_that_differ_early_do_not_agree() -> None:
    """Contract: an equal end is not enough, and neither is an equal curve of agents that learn nothing."""
    slow, fast = [[0.0, 10.0], [1.0, 10.0], [2.0, 10.0]], [[9.0, 10.0], [10.0, 10.0], [9.5, 10.0]]
    assert_curves_agree(slow, slow, slack=0.0, learnt=5.0)
    with pytest.raises(AssertionError, match="area"):
        assert_curves_agree(slow, fast, slack=1.0, learnt=5.0)
    with pytest.raises(AssertionError):
        assert_curves_agree(slow, slow, slack=0.0, learnt=20.0)
