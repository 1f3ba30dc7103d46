"""Task sampling by measured difficulty."""

from __future__ import annotations

from collections import Counter

import pytest

from stages.algorithms.parts.curriculum import Curriculum
from stages.algorithms.sources.static import RATE, TaskSampler


def test_tasks_of_medium_difficulty_are_drawn_most_often():
    measured = {"easy": 1.0, "hard": 0.0, "middle": 0.5, "near": 0.9}
    sampler = TaskSampler(measured, measured, Curriculum(kind="difficulty", floor=0.05), 1)
    assert dict(zip(sampler.task_ids, sampler.weights(), strict=True)) == pytest.approx(
        {"easy": 0.05, "hard": 0.05, "middle": 0.3, "near": 0.14}
    )
    counts = dict.fromkeys(measured, 0)
    for step in range(2000):
        counts[sampler.draw(0, step)[0]] += 1
    total = 0.05 + 0.05 + 0.3 + 0.14
    for name, weight in zip(sampler.task_ids, sampler.weights(), strict=True):
        assert counts[name] / 2000 == pytest.approx(weight / total, abs=0.04)


def test_draws_are_without_replacement_and_depend_only_on_the_key():
    tasks = [f"t{index}" for index in range(8)]
    sampler = TaskSampler(tasks, {}, Curriculum(kind="uniform"), 5)
    first = sampler.draw(1, 2)
    assert len(set(first)) == 5
    assert first == TaskSampler(tasks[::-1], {}, Curriculum(kind="uniform"), 5).draw(1, 2)
    assert any(first != sampler.draw(1, step) for step in range(3, 8))


def test_estimates_are_updated_and_unmeasured_tasks_start_at_the_mean():
    sampler = TaskSampler(["a", "b", "c"], {"a": 0.2, "b": 0.6}, Curriculum(), 1)
    assert sampler.success["c"] == pytest.approx(0.4)
    sampler.observe({"a": [True, True, False, True]})
    assert sampler.success["a"] == pytest.approx(0.2 + RATE * (0.75 - 0.2))


def test_without_floor_always_solved_or_failed_tasks_come_last():
    sampler = TaskSampler(["a", "b", "c"], {"a": 0.0, "b": 0.5, "c": 1.0}, Curriculum(floor=0.0), 2)
    assert all("b" in sampler.draw(step) for step in range(20))


def test_too_few_tasks_is_an_error_that_names_the_key():
    with pytest.raises(ValueError, match=r"rl\.tasks_per_step is 3"):
        TaskSampler(["a", "b"], {}, Curriculum(), 3)


def test_small_weights_are_drawn_evenly() -> None:
    """u^(1/w) is 0 for weights of 1e-4; its logarithm is not, so that no task comes first by its place."""
    tasks = [f"t{number:03d}" for number in range(200)]
    sampler = TaskSampler(tasks, dict.fromkeys(tasks, 0.9999), Curriculum(kind="difficulty", floor=0.0), 5)
    drawn = Counter(task for step in range(400) for task in sampler.draw("key", step))
    assert max(drawn.values()) < 30, "10 are expected of each"
