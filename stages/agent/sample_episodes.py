"""Which of many episodes are shown to people, and how one ended in a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.records.episode import row_succeeded
from stages.seeding import permutation

Row = Mapping[str, Any]


def outcome(row: Row) -> str:
    """ "success", "truncated" (cut by a limit) or "failure"."""
    if row_succeeded(row):
        return "success"
    return "truncated" if row["truncated"] else "failure"


def choose(rows: Sequence[Row], count: int, *key: object) -> list[tuple[str, Row]]:
    """`count` distinct rows in turn best, worst, random: best by return, then fewest tokens; worst the reverse; ties by id.

    The random ones depend on `key` and the ids alone. Returns (how it was picked, row).
    """
    ordered = sorted(rows, key=lambda row: (-row["reward"], len(row["token_ids"]), row["episode_id"]))
    queues = {
        "best": ordered,
        "worst": ordered[::-1],
        "random": permutation(sorted(rows, key=lambda row: row["episode_id"]), *key),
    }
    places = dict.fromkeys(queues, 0)
    chosen: list[tuple[str, Row]] = []
    taken: set[str] = set()
    while len(chosen) < min(count, len(rows)):
        for pick, queue in queues.items():
            while places[pick] < len(queue) and queue[places[pick]]["episode_id"] in taken:
                places[pick] += 1
            if places[pick] < len(queue) and len(chosen) < count:
                chosen.append((pick, queue[places[pick]]))
                taken.add(queue[places[pick]]["episode_id"])
    return chosen
