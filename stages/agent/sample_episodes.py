"""Selects sample episodes to show in reports, and labels their outcomes."""

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
    """Pick `count` distinct rows, cycling through best, worst and random; returns (kind of pick, row).

    Best: highest return, then fewest tokens; worst: the reverse; ties by id. Random picks depend only on `key` and the ids.
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
