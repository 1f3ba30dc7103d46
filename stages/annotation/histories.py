"""The tokens that the policy sees at a node of a tree where steps hide earlier observations (`Step.forgets`)."""

from __future__ import annotations

from collections.abc import Sequence

from stages.annotation.interfaces import ChatFormat
from stages.annotation.tree import Edge


def hidden(edges: Sequence[Edge]) -> set[int]:
    """The turns of a path, as places in `edges`, whose observations are hidden at its end."""
    return {place - edge.forgets for place, edge in enumerate(edges) if edge.forgets}


def usable(edges: Sequence[Edge], place: int) -> int:
    """Of the first `place` turns of a path, how many may be in a cached prefix for its end: none whose observation a later turn
    hides."""
    later = (number - edge.forgets for number, edge in enumerate(edges) if edge.forgets and number >= place)
    return min([place, *later])


def seen(chat: ChatFormat, edges: Sequence[Edge], place: int = 0) -> list[int]:
    """The tokens of a path's turns from `place` on as its end sees them."""
    without, tokens = hidden(edges), list[int]()
    for number, edge in enumerate(edges[place:], start=place):
        context = list(edge.context_ids)
        if number in without:
            start = len(chat.closing_tokens(edge.token_ids))
            first, last = chat.observation_text(context[start:])
            del context[start + first : start + last]
        tokens += [*edge.token_ids, *context]
    return tokens
