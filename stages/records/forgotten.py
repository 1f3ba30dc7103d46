"""What an episode says of observations that left its context (`Episode.forgotten`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def left_context(forgotten: Iterable[Sequence[int]]) -> dict[int, int]:
    """Turn whose observation later turns did not see -> the turn after which it left their context, from 0, by turn; of
    `Episode.forgotten`. An observation can be hidden again, which changes nothing: the first time counts."""
    first: dict[int, int] = {}
    for turn, by in forgotten:
        first.setdefault(turn, by)
    return dict(sorted(first.items()))
