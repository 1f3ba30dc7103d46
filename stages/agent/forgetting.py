"""Observations that the policy's later turns do not see, since a step said so (`Step.forgets`).

An episode keeps all its tokens. What a turn saw is its tokens before it, less the spans hidden by then: a span is the text of an
observation, whose message stays, empty, so that roles still alternate. The engine's session is opened anew without it, and the
training pass reads each stretch of an episode under what was visible there (stages/training/common/hidden.py), so that nothing
later depends on it, through the cache neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stages.agent.chat import Chat
from stages.engine.engine import Engine
from stages.records.episode import Episode

Span = tuple[int, int, int]
"""(start, stop, since): tokens [start, stop) are hidden from the token at `since` on."""


@dataclass(frozen=True)
class View:
    """What a stretch of tokens saw."""

    columns: list[int]
    """Visible tokens up to the end of the stretch, in order."""
    start: int
    """Where the stretch begins: tokens before it belong to earlier views."""


def views(length: int, spans: Sequence[Span]) -> list[View]:
    """The stretches of a row of `length` tokens between which something is hidden; together they are the row."""
    bounds = [0, *sorted({since for _, _, since in spans if 0 < since < length}), length]
    found = []
    for start, end in pairwise(bounds):
        hidden = {place for first, stop, since in spans if since <= start for place in range(first, stop)}
        found.append(View([place for place in range(end) if place not in hidden], start))
    return found


def visible(token_ids: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """The tokens that what comes next will see."""
    hidden = {place for first, stop, _ in spans for place in range(first, stop)}
    return [token for place, token in enumerate(token_ids) if place not in hidden]


def hidden_spans(
    chat: Chat, token_ids: Sequence[int], turns: Sequence[tuple[int, int]], forgotten: Sequence[Sequence[int]]
) -> list[Span]:
    """The spans of `Episode.forgotten`; turns: [start, end) of each turn's tokens."""
    found = []
    for turn, by in forgotten:
        (first, last), following = turns[turn], turns[turn + 1][0]
        start = last + len(chat.closing_tokens(token_ids[first:last]))
        begin, end = chat.observation_text(token_ids[start:following])
        found.append((start + begin, start + end, turns[by][1]))
    return found


def with_hidden(chat: Chat, episode: Episode) -> Episode:
    """The episode with the `hidden` spans of what it has forgotten."""
    turns = [(turn.start, turn.end) for turn in episode.turns]
    episode.hidden = hidden_spans(chat, episode.token_ids, turns, episode.forgotten)
    return episode


def forget(chat: Chat, episode: Episode, turn: int, by: int) -> None:
    """Record that turn `by` hid the observation of `turn` from later turns."""
    episode.forgotten.append([turn, by])
    with_hidden(chat, episode)


def reopened(engine: Engine, session: int, kept: int, token_ids: Sequence[int]) -> int:
    """Close a session, and open one with its first `kept` tokens, then `token_ids`."""
    prefix: Any = engine.snapshot(session, kept)
    engine.close(session)
    return engine.open(token_ids, prefix)
