"""The data report: accepted and rejected tasks with reasons, difficulty and length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stages.curation.cleaning import episode_length, pieces
from stages.curation.demonstrations import Demonstrations
from stages.curation.panel import Panel
from stages.curation.raw import Rejection
from stages.records.episode import EXPERT, NOISY, Episode
from stages.records.task import SPLITS, Split, Task


def histogram(values: Iterable[float]) -> dict[str, int]:
    """Value -> count, in the order of the values; keys are their shortest decimal form."""
    return {f"{value:g}": count for value, count in sorted(Counter(values).items())}


def summary(values: Sequence[int]) -> dict[str, float]:
    """n, mean, min, median and max; only n for an empty sequence."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "mean": round(sum(ordered) / len(ordered), 3),
        "min": ordered[0],
        "median": ordered[len(ordered) // 2],
        "max": ordered[-1],
    }


def _split_report(tasks: Sequence[Task], asked: int) -> dict[str, Any]:
    return {
        "asked": asked,
        "kept": len(tasks),
        "clusters": len({task.cluster for task in tasks}),
        "difficulty": histogram(task.difficulty for task in tasks),
        "prompt_words": summary([len(pieces(task.prompt)) for task in tasks]),
    }


def _demonstration_report(demonstrations: Demonstrations) -> dict[str, Any]:
    def of(policy: str) -> list[Episode]:
        return [episode for episode in demonstrations.episodes if episode.policy_hash == policy]

    turns = [turn for episode in demonstrations.episodes for turn in episode.turns]
    return {
        "kept": {"expert": len(of(EXPERT)), "noisy": len(of(NOISY))},
        "rejected": dict(sorted(demonstrations.rejected.items())),
        "turns": histogram(len(episode.turns) for episode in demonstrations.episodes),
        "words": summary([episode_length(episode) for episode in demonstrations.episodes]),
        "random_actions": sum(episode.reward_terms["random_actions"] for episode in demonstrations.episodes),
        "refused_actions": sum(not turn.accepted for turn in turns),
    }


def data_report(
    source: Mapping[str, Any],
    tasks: Sequence[Task],
    asked: Mapping[Split, int],
    rejections: Sequence[Rejection],
    demonstrations: Demonstrations,
    panel: Panel,
) -> dict[str, Any]:
    """Plain JSON. `source` says what was read: {"file", "records", "unused", "warnings"}; lengths count words and marks."""
    return {
        "domain": panel.domain,
        "source": dict(source),
        "splits": {split: _split_report([task for task in tasks if task.split == split], asked[split]) for split in SPLITS},
        "rejected": dict(sorted(Counter(rejection.reason for rejection in rejections).items())),
        "rejections": [
            {"reason": item.reason, "where": f"{item.file}:{item.line}", "task_id": item.task_id, "detail": item.detail}
            for item in sorted(rejections, key=lambda item: (item.file, item.line, item.reason))
        ],
        "demonstrations": _demonstration_report(demonstrations),
        "panel": {"hash": panel.hash, "n": len(panel.tasks)},
    }


def shortages(tasks: Sequence[Task], asked: Mapping[Split, int], labels: Mapping[Split, str]) -> list[str]:
    """A line for each split with fewer tasks than requested; `labels`: where its records come from."""
    kept = Counter(task.split for task in tasks)
    return [
        f"{split}: only {kept[split]} of the {count} requested tasks (curate.{split}), since {labels[split]} has no more usable "
        f"records; add some, or lower curate.{split}"
        for split, count in asked.items()
        if kept[split] < count
    ]
