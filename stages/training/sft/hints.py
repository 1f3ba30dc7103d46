"""Demonstrations with hints in their first message, so that a model learns what hints are before rl gives it any."""

from __future__ import annotations

from collections.abc import Sequence

from stages.agent.guidance import KINDS, hint_of, leaks, marked
from stages.records.episode import Episode
from stages.seeding import stream


def demonstration_hints(demonstrations: Sequence[Episode], share: float, seed: int) -> list[str]:
    """For each demonstration "", or for a random `share` of them a marked hint of a random kind, taken from its own actions;
    feedback is about another demonstration of the same task. Independent of the order of demonstrations."""
    if not share:
        return [""] * len(demonstrations)
    by_task: dict[str, list[Episode]] = {}
    for episode in sorted(demonstrations, key=lambda episode: episode.episode_id):
        by_task.setdefault(episode.task_id, []).append(episode)
    return [_hint(episode, by_task[episode.task_id], share, seed) for episode in demonstrations]


def _hint(episode: Episode, of_task: Sequence[Episode], share: float, seed: int) -> str:
    rng = stream("sft.guided", seed, episode.episode_id)
    if rng.random() >= share or not episode.turns:
        return ""
    kind = rng.choice(KINDS)
    others = [other for other in of_task if other.episode_id != episode.episode_id]
    if kind == "env_feedback" and not others:
        kind = "plan"
    failed = rng.choice(others).turns if kind == "env_feedback" else []
    hint = hint_of(kind, episode.turns, failed)
    return marked(hint) if hint and not leaks(hint, episode.turns[-1].action) else ""
