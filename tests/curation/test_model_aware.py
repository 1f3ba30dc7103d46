"""Model-aware selection: buckets by measured success, and the mix that is drawn."""

from __future__ import annotations

import pytest

from stages.algorithms.parts.curriculum import Curriculum
from stages.algorithms.parts.selection import Selection
from stages.algorithms.sources.static import TaskSampler
from stages.curation.model_aware import bucket, histogram, shares
from stages.training.rl.curriculum import selected

MEASURED = {"a": 0.0, "b": 2 / 8, "c": 3 / 8, "d": 6 / 8, "e": 1.0, "f": 1 / 8}


@pytest.mark.parametrize(("successes", "expected"), [(0, None), (2, "hard"), (3, "medium"), (6, "easy"), (8, None)])
def test_bucket_by_success_rate(successes: int, expected: str | None) -> None:
    """0/8, 2/8, 3/8, 6/8, 8/8: dropped, hard, medium, easy, dropped."""
    assert bucket(successes / 8, 0.75, 0.25) == expected


def test_shares_of_buckets_match_the_targets() -> None:
    """Two hard tasks share the weight of their bucket; tasks that are never or always solved are dropped."""
    assert histogram(MEASURED) == {"easy": 1, "medium": 1, "hard": 2, "dropped": 2}
    weights = shares(MEASURED, 0.75, 0.25, {"easy": 1.0, "medium": 2.0, "hard": 1.0})
    assert weights == pytest.approx({"b": 0.5, "c": 2.0, "d": 1.0, "f": 0.5})
    assert sum(weights.values()) == pytest.approx(len(weights))
    assert set(shares(MEASURED, 0.75, 0.25, {"easy": 0.0, "medium": 1.0, "hard": 1.0})) == {"b", "c", "f"}
    assert shares({"a": 0.0, "e": 1.0}, 0.75, 0.25, {"easy": 1.0, "medium": 1.0, "hard": 1.0}) == {}


def test_selection_limits_the_drawn_tasks() -> None:
    tasks = ["a", "b", "c", "d", "e", "f", "unmeasured"]
    assert selected(tasks, MEASURED, Selection()) == dict.fromkeys(tasks, 1.0)
    kept = selected(tasks, MEASURED, Selection(kind="model_aware"))
    assert set(kept) == {"b", "c", "d", "f"}
    sampler = TaskSampler(kept, MEASURED, Curriculum(kind="uniform"), 2, kept)
    assert sampler.weights() == [kept[name] for name in ("b", "c", "d", "f")]
    drawn = {task for step in range(20) for task in sampler.draw(0, step)}
    assert drawn == {"b", "c", "d", "f"}
    with pytest.raises(ValueError, match="always or never"):
        selected(["a", "e"], MEASURED, Selection(kind="model_aware"))
    with pytest.raises(ValueError, match=r"rollout\.tasks"):
        TaskSampler(kept, MEASURED, Curriculum(), 5, kept)


def test_further_draws_exclude_drawn_tasks() -> None:
    sampler = TaskSampler(MEASURED, MEASURED, Curriculum(kind="uniform"), 4)
    first = sampler.draw(0, 1)
    assert sampler.draw(0, 1, count=0, without=first) == []
    assert sorted([*first, *sampler.draw(0, 1, 1, count=9, without=first)]) == sorted(MEASURED)
