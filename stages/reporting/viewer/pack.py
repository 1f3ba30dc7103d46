"""A group of episodes as compact JSON: texts and runs of tokens that episodes share are written once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from stages.records.episode import Owner
from stages.reporting.blocks import rounded
from stages.reporting.hidden import Chats, hidden_observations, no_chat
from stages.reporting.viewer.groups import Group, Row

DIGITS = 1000
"""Log-probabilities are whole thousandths."""


class Interned:
    """Values by the order of their first use."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        if value not in self._places:
            self._places[value] = len(self.values)
            self.values.append(value)
        return self._places[value]


def runs(values: Iterable[Any]) -> list[list[Any]]:
    """Run-length encoding: [[value, count], ...]."""
    found: list[list[Any]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


def state_name(task: str, state: str) -> str:
    """8 hex digits that name a state of a task, equal in all groups."""
    return hashlib.sha256(f"{task}\n{state}".encode()).hexdigest()[:8]


def spans_of(row: Row) -> list[tuple[tuple[int, ...], int, int]]:
    """The episode's tokens as (ids, owner, turn) of each run with one owner and turn, in order."""
    spans: list[tuple[tuple[int, ...], int, int]] = []
    start, ids, marks = 0, row["token_ids"], list(zip(row["owner"], row["turn"], strict=True))
    for place in range(1, len(ids) + 1):
        if place == len(ids) or marks[place] != marks[start]:
            spans.append((tuple(ids[start:place]), *marks[start]))
            start = place
    return spans


def pack_episode(row: Row, texts: Interned, spans: Interned, chat: Chats = no_chat) -> list[Any]:
    """[messages, turns, spans, log-probabilities, advantages, and, as far as the row has one of them or a later one, step credit
    by turn, the turns' places in their play, and `hidden_observations`; null for one that it lacks].

    messages: [role's text, content's text, ...]; turns: [action, observation, state, accepted, reward, cost] each; spans: [ids,
    owner, turn] each; log-probabilities and advantages (as runs; null if not trained on): of policy tokens. Texts, states and ids
    are places in `texts` and `spans`.
    """
    policy = [place for place, owner in enumerate(row["owner"]) if owner == Owner.POLICY]
    advantages, credit, moves = row.get("advantages"), row.get("credit"), row.get("moves")
    credited = None if credit is None else [rounded(value) for value in credit]
    further = [credited, list(moves) if moves else None, hidden_observations(row, chat) or None]
    while further and further[-1] is None:
        further.pop()
    return [
        [texts(message[part]) for message in row["messages"] for part in ("role", "content")],
        [
            [
                texts(turn["action"]),
                texts(turn["observation"]),
                texts(state_name(row["task_id"], turn["state_key"])),
                int(turn["accepted"]),
                rounded(turn["reward"]),
                rounded(turn["cost"]),
            ]
            for turn in row["turns"]
        ],
        [[spans(ids), owner, turn] for ids, owner, turn in spans_of(row)],
        [round(DIGITS * row["logprob"][place]) for place in policy],
        None if advantages is None else runs(rounded(advantages[place]) for place in policy),
        *further,
    ]


def used_tokens(rows: Sequence[Row]) -> set[int]:
    return {token for row in rows for token in row["token_ids"]}


def script(function: str, *values: Any) -> str:
    """A JavaScript file that calls `viewer.<function>` with JSON values; loaded by a <script> tag, it works without a server."""
    written = ", ".join(json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False) for value in values)
    # JSON is JavaScript except for these two line separators in older browsers.
    return f"viewer.{function}({written});\n".replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def pack_group(group: Group, chat: Chats = no_chat) -> str:
    """The file of a group: its texts, runs of token ids, and episodes. chat: finds the tokens of hidden observations."""
    texts, spans = Interned(), Interned()
    episodes = [pack_episode(row, texts, spans, chat) for row in group.rows]
    return script("arrived", group.key, {"texts": texts.values, "spans": spans.values, "episodes": episodes})
