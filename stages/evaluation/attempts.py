"""Statistics of repeated attempts at training tasks: difficulty, pass@k, lengths, how episodes ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.curation.model_aware import histogram
from stages.evaluation.statistics import pass_at_k
from stages.records.episode import Episode


def successes(episodes: Sequence[Episode]) -> dict[str, list[bool]]:
    """Per task, sorted by id, whether each attempt succeeded."""
    tasks: dict[str, list[bool]] = {}
    for episode in sorted(episodes, key=lambda episode: (episode.task_id, episode.episode_id)):
        tasks.setdefault(episode.task_id, []).append(episode.success)
    return tasks


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, quartiles and range; zeros if there are no values."""
    numbers = np.asarray(values, dtype=np.float64) if len(values) else np.zeros(1)
    low, median, high = (float(value) for value in np.quantile(numbers, [0.25, 0.5, 0.75]))
    return {
        "mean": float(numbers.mean()),
        "std": float(numbers.std()),
        "min": float(numbers.min()),
        "q25": low,
        "median": median,
        "q75": high,
        "max": float(numbers.max()),
    }


def summary(episodes: Sequence[Episode], attempts: int) -> dict[str, Any]:
    """The stage's report: pass@k for the powers of two up to `attempts`, reward, turns, lengths, how episodes ended."""
    tasks = successes(episodes)
    turns = [turn for episode in episodes for turn in episode.turns]
    powers = [2**index for index in range(attempts.bit_length()) if 2**index <= attempts]
    reasons = [episode.stop_reason for episode in episodes]
    return {
        "tasks": len(tasks),
        "episodes": len(episodes),
        "success": float(np.mean([episode.success for episode in episodes])),
        "pass_at_k": {
            str(k): float(np.mean([pass_at_k(len(outcomes), sum(outcomes), k) for outcomes in tasks.values()])) for k in powers
        },
        "buckets": histogram({task: float(np.mean(outcomes)) for task, outcomes in tasks.items()}),
        "tasks_never_solved": sum(not any(outcomes) for outcomes in tasks.values()),
        "tasks_always_solved": sum(all(outcomes) for outcomes in tasks.values()),
        "reward": spread([episode.reward for episode in episodes]),
        "turns": spread([len(episode.turns) for episode in episodes]),
        "tokens": spread([len(episode.token_ids) for episode in episodes]),
        "policy_tokens": spread([episode.policy_tokens for episode in episodes]),
        "cost": spread([sum(turn.cost for turn in episode.turns) for episode in episodes]),
        "accepted_actions": float(np.mean([turn.accepted for turn in turns])) if turns else 0.0,
        "stop_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "reward_terms": {
            name: float(np.mean([episode.reward_terms.get(name, 0.0) for episode in episodes]))
            for name in sorted({name for episode in episodes for name in episode.reward_terms})
        },
    }
