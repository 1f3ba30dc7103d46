"""Demonstrations with hints or instructions in their first message, so that a model learns what these are before rl gives it
any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.agent.guidance import KINDS, hint_of, leaks, marked, solution_answers
from stages.agent.instructions import followed
from stages.records.episode import Episode
from stages.seeding import stream

Specs = Mapping[tuple[str, str], Mapping[str, Any]]
"""(domain, task's id) -> the task's spec."""


def demonstration_hints(demonstrations: Sequence[Episode], share: float, seed: int, specs: Specs) -> list[str]:
    """For each demonstration "", or for a random `share` of them a marked hint of a random kind, taken from its own actions;
    feedback is about another demonstration of the same task. No hint contains an answer (`solution_answers`). Independent of the
    order of demonstrations."""
    if not share:
        return [""] * len(demonstrations)
    by_task: dict[str, list[Episode]] = {}
    for episode in sorted(demonstrations, key=lambda episode: episode.episode_id):
        by_task.setdefault(episode.task_id, []).append(episode)
    return [_hint(episode, by_task[episode.task_id], share, seed, specs) for episode in demonstrations]


def _hint(episode: Episode, of_task: Sequence[Episode], share: float, seed: int, specs: Specs) -> str:
    rng = stream("sft.guided", seed, episode.episode_id)
    if rng.random() >= share or not episode.turns:
        return ""
    kind = rng.choice(KINDS)
    others = [other for other in of_task if other.episode_id != episode.episode_id]
    if kind == "env_feedback" and not others:
        kind = "plan"
    failed = rng.choice(others).turns if kind == "env_feedback" else []
    hint = hint_of(kind, episode.turns, failed)
    answers = solution_answers(specs.get((episode.domain, episode.task_id), {}), episode.turns[-1].action)
    return marked(hint) if hint and not leaks(hint, *answers) else ""


def demonstration_instructions(demonstrations: Sequence[Episode], share: float, seed: int) -> list[str]:
    """For each demonstration "", or for a random `share` of them some of the phrases that it follows, each with probability 1/2,
    to be put before its first message. Independent of the order of demonstrations."""
    return [_instruction(episode, share, seed) if share else "" for episode in demonstrations]


def _instruction(episode: Episode, share: float, seed: int) -> str:
    rng = stream("sft.instructed", seed, episode.episode_id)
    if rng.random() >= share or not episode.turns:
        return ""
    return "".join(f"{phrase} " for phrase in followed(episode.turns) if rng.random() < 0.5)
