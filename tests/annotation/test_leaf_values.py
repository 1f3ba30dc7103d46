"""What the value model that leaves are read with learns from."""

from __future__ import annotations

import pytest

from stages.annotation.leaf_values import episode_paths, fit_leaf_model
from stages.parameters.annotate import Annotate


def row(reward: float, starts: list[int], inherited: int = 0) -> dict:
    turns = [{"start": start, "end": start + 2} for start in starts]
    return {"task_id": "a", "turns": turns, "token_ids": list(range(20)), "reward": reward, "inherited": inherited}


def test_histories_before_turns_learn_the_return() -> None:
    """Contract: a leaf counts as a rollout from it would in the tree, so the model learns returns, partial ones too; what a
    branch took over counts in its parent alone."""
    first, branch = episode_paths([row(0.25, [3, 8, 13]), row(1.0, [3, 8, 13], inherited=2), row(1.0, [])])
    assert (first.boundaries, first.successes, first.rollouts) == ([2, 7, 12], [0.25] * 3, [1.0] * 3)
    assert first.token_ids == list(range(13))
    assert (branch.boundaries, branch.successes) == ([12], [1.0])


def test_returns_beyond_the_head_are_refused() -> None:
    """Contract: a head over bins that cannot say a return is an error that names the keys, not a clipped target."""
    paths = episode_paths([row(-6.0, [3])])
    with pytest.raises(ValueError, match=r"head covers -0\.2 to 1\.2.*from -6 to -6: widen v_min and v_max"):
        fit_leaf_model(None, paths, Annotate(), 0, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"raise rollout\.tasks"):
        fit_leaf_model(None, [], Annotate(), 0, 64)  # type: ignore[arg-type]
