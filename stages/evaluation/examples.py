"""Demonstrations that a model sees before its task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stages.records.episode import read_episodes, read_tasks


def shortest(folder: Path, count: int) -> tuple[Mapping[str, str], ...]:
    """The messages of the `count` shortest demonstrations of training tasks in data/curated/<domain>, by characters, then id; one
    per task, each up to its last action. Raises ValueError if there are fewer."""
    train = {task.task_id for task in read_tasks(folder / "tasks.parquet", "train")}
    found = [episode for episode in read_episodes(folder / "demonstrations.parquet") if episode.task_id in train]
    found.sort(key=lambda episode: (sum(len(message["content"]) for message in episode.messages), episode.episode_id))
    of_task = {episode.task_id: episode for episode in reversed(found)}
    chosen = [episode for episode in found if of_task[episode.task_id] is episode][:count]
    if len(chosen) < count:
        raise ValueError(
            f"evaluate.examples is {count}, and {folder / 'demonstrations.parquet'} has demonstrations of {len(chosen)} training "
            "tasks; set evaluate.examples lower, or curate.expert_demonstrations above 0"
        )
    return tuple(message for episode in chosen for message in episode.messages[: len(episode.messages) // 2 * 2])
