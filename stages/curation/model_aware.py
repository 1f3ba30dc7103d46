"""Model-aware data selection (Yu et al., arXiv 2510.11701): selects and mixes tasks by a policy's success rates.

The SFT policy attempts each task several times (the rollout stage, `rollout.attempts`; 8 in the paper). Tasks that it always or
never solves are dropped; the others are divided into easy, medium and hard and sampled to match a target mix. rollout measures,
and rl samples with these functions (`rl.selection`). reports/rollout/<domain>.json has the mix of its own policy (`buckets`), to
copy into `rl.selection.target` of another run.
"""

from __future__ import annotations

from collections.abc import Mapping

BUCKETS = ("easy", "medium", "hard")


def bucket(success: float, easy_min: float, hard_max: float) -> str | None:
    """easy (success >= easy_min), hard (<= hard_max) or medium; None for a task that is always or never solved."""
    if success <= 0.0 or success >= 1.0:
        return None
    if success >= easy_min:
        return "easy"
    return "hard" if success <= hard_max else "medium"


def histogram(measured: Mapping[str, float], easy_min: float = 0.75, hard_max: float = 0.25) -> dict[str, int]:
    """Number of tasks in each bucket and of those `dropped`, from success rates by task."""
    counts = dict.fromkeys((*BUCKETS, "dropped"), 0)
    for success in measured.values():
        counts[bucket(success, easy_min, hard_max) or "dropped"] += 1
    return counts


def shares(measured: Mapping[str, float], easy_min: float, hard_max: float, target: Mapping[str, float]) -> dict[str, float]:
    """Sampling weights, of mean 1, of the tasks that are not dropped; non-empty buckets are weighted by `target`."""
    places = {task: bucket(success, easy_min, hard_max) for task, success in sorted(measured.items())}
    counts = {name: sum(place == name for place in places.values()) for name in BUCKETS}
    weights = {
        task: target[place] / counts[place] for task, place in places.items() if place is not None and target.get(place, 0.0) > 0
    }
    total = sum(weights.values())
    return {task: weight * len(weights) / total for task, weight in weights.items()}
