"""Thoughts in demonstrations (`curate.thoughts`): the expert's, or padding of equal length. Light to import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from stages.environments.protocol import Domain
from stages.records.episode import Episode
from stages.records.task import Task
from stages.records.thinking import Thinking

THOUGHT = "thought"
"""Optional method of a domain: stages/environments/protocol.py."""
PADDED = 3
"""Characters of a thought that one dot of padding stands for, about a token."""


def add_thoughts(domain: Domain, task: Task, episode: Episode, kind: Literal["expert", "padding"], thinking: Thinking) -> None:
    """Begin each of the episode's messages with a thought; turns keep the action alone."""
    actions = [turn.action for turn in episode.turns]
    spoken = [message for message in episode.messages if message["role"] == "assistant"]
    for number, message in enumerate(spoken, start=1):
        thought = " ".join(getattr(domain, THOUGHT)(task, actions[:number]).split())
        if kind == "padding":
            thought = " ".join("." * -(-len(thought) // PADDED))
        action = message["content"]
        if thinking.response:
            action = " ".join((thinking.response[0], action, thinking.response[1]))
        message["content"] = f"{thinking.start} {thought} {thinking.end} {action}"


def thought_contradictions(kind: str, thinking: Thinking | None, name: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Why the domain called `name` can't have demonstrations with thoughts."""
    from stages.environments.registry import load_domain

    if kind == "none":
        return
    if thinking is None:
        yield (
            f"curate.thoughts: {kind} puts thoughts between markers, and model.thinking is null: set that to {{}}, or thoughts "
            f"to none"
        )
    if not hasattr(load_domain(name, settings), THOUGHT):
        yield f"curate.thoughts: {kind} needs a domain whose experts think, and {name} has no `{THOUGHT}`: set it to none"
