"""What an episode holds beside its texts, in a form that other tools' trajectory formats carry along unread, so that an exported
episode comes back in as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from stages.exchange.episodes import conversation
from stages.records.episode import Episode, TurnRecord

KEY = "bellwether"
"""Key of `Aside` in the formats' places for custom data."""
Runs = list[tuple[int, int]]
"""Run-length encoding: (value, count)."""


WRITTEN = ("token_ids", "owner", "logprob", "turn", "turns", "messages")
"""Columns of an episode that are written in a form of their own."""


def _columns(record: type, without: Sequence[str]) -> dict[str, Any]:
    """The record's other columns as fields of a model. Those with a default may be absent: older files lack them."""
    types = get_type_hints(record)
    found: dict[str, Any] = {}
    for item in fields(record):
        if item.name not in without and item.metadata.get("stored", True):
            default = item.default if item.default is not MISSING else ...
            made = item.default_factory() if item.default_factory is not MISSING else default
            found[item.name] = (types[item.name], made)
    return found


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


TURN, PLAIN = _columns(TurnRecord, ("action", "observation")), _columns(Episode, WRITTEN)
TurnAside: type[BaseModel] = create_model("TurnAside", __base__=_Strict, **TURN)
"""A `TurnRecord` without its action and observation."""


class Tokens(_Strict):
    """What stands beside the plain columns."""

    turns: list[TurnAside]  # type: ignore[valid-type]
    owner: Runs
    turn: Runs
    messages: int | list[dict[str, str]]
    """How many messages of `conversation` the episode holds; or all of them, where they differ from those."""
    token_ids: list[int] = []
    logprob: list[float] = []
    """Both: only in formats that have no place of their own for them."""


Aside: Any = create_model("Aside", __base__=Tokens, **PLAIN)
"""An `Episode` without its texts, and in some formats without token ids and log-probabilities."""


def runs(values: Iterable[int]) -> Runs:
    found: Runs = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + 1)
        else:
            found.append((value, 1))
    return found


def unrolled(given: Runs, length: int, name: str) -> list[int]:
    """The values of `runs`. Raises ValueError unless there are `length`."""
    if any(count < 1 for _, count in given) or sum(count for _, count in given) != length:
        raise ValueError(f"{KEY}.{name} does not describe {length} tokens")
    return [value for value, count in given for _ in range(count)]


def aside(episode: Episode, tokens: bool = False) -> dict[str, Any]:
    """`Aside` of an episode as JSON; `tokens`: with token ids and log-probabilities."""
    told = conversation(episode)
    whole = told if len(told) % 2 or not episode.turns else [*told, {"role": "user", "content": ""}]
    count = len(episode.messages)
    held: dict[str, Any] = {name: getattr(episode, name) for name in PLAIN}
    for name in ("owner", "turn"):
        held[name] = [list(run) for run in runs(getattr(episode, name))]
    held["turns"] = [{name: getattr(turn, name) for name in TURN} for turn in episode.turns]
    held["messages"] = count if episode.messages == whole[:count] else episode.messages
    return {**held, "token_ids": episode.token_ids, "logprob": episode.logprob} if tokens else held


def restored(
    given: Any, opening: str, turns: Sequence[tuple[str, str, str]], token_ids: Sequence[int], logprob: Sequence[float]
) -> Episode:
    """The episode; `given`: an Aside; `turns`: message of the policy, action and observation of each turn.

    Raises ValueError if they disagree.
    """
    if len(turns) != len(given.turns):
        raise ValueError(f"{given.episode_id} has {len(turns)} turns, but {KEY}.turns describes {len(given.turns)}")
    if len(token_ids) != len(logprob):
        raise ValueError(f"{given.episode_id} has {len(token_ids)} tokens and {len(logprob)} log-probabilities")
    messages = [{"role": "user", "content": opening}]
    for message, _, observation in turns:
        messages += [{"role": "assistant", "content": message}, {"role": "user", "content": observation}]
    for pair in given.forgotten:
        if len(pair) != 2 or not 0 <= pair[0] < pair[1] < len(turns):
            raise ValueError(
                f"{KEY}.forgotten of {given.episode_id} has {pair}; it must list pairs [turn, later turn], below {len(turns)}"
            )
    length = len(token_ids)
    return Episode(
        **{name: getattr(given, name) for name in PLAIN},
        token_ids=list(token_ids),
        logprob=list(logprob),
        owner=unrolled(given.owner, length, "owner"),
        turn=unrolled(given.turn, length, "turn"),
        turns=[
            TurnRecord(action=action, observation=observation, **told.model_dump())
            for (_, action, observation), told in zip(turns, given.turns, strict=True)
        ],
        messages=messages[: given.messages] if isinstance(given.messages, int) else given.messages,
    )
