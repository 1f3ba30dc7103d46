"""Priced tools in records: a call's price is its turn's `cost`, and its tool is named by a reward term, `calls/<tool>`.

Every step of an environment with priced tools has the terms of all its tools, 0 where the tool was not called. Without such terms
a turn's `cost` is a number of calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stages.records.episode import Episode, TurnRecord

CALLS = "calls/"
"""Prefix of the terms."""


def call_terms(tools: Iterable[str], called: str | None = None) -> dict[str, float]:
    """The terms of a step that called one of the `tools`, or none."""
    return {CALLS + tool: float(tool == called) for tool in tools}


def calls_by_tool(terms: Mapping[str, float]) -> dict[str, float]:
    """Tool -> calls, from the terms of a step or an episode; {} without priced tools."""
    return {name.removeprefix(CALLS): value for name, value in sorted(terms.items()) if name.startswith(CALLS)}


def number_of_calls(turn: TurnRecord) -> float:
    """Calls in a turn, whatever they cost."""
    calls = calls_by_tool(turn.terms)
    return sum(calls.values()) if calls else turn.cost


def tools_called(episode: Episode) -> int:
    """Number of different tools that an episode called: priced ones by their terms, others by the first words of accepted actions
    with a cost."""
    found = set()
    for turn in episode.turns:
        calls = calls_by_tool(turn.terms)
        found |= {name for name, count in calls.items() if count}
        if not calls and turn.accepted and turn.cost > 0:
            found.add(turn.action_key.split(" ")[0])
    return len(found)


def has_prices(episodes: Iterable[Episode]) -> bool:
    """Whether the episodes were played with priced tools."""
    return any(calls_by_tool(turn.terms) for episode in episodes for turn in episode.turns)


def spent(episode: Episode) -> float:
    """What an episode's calls cost, inherited turns included."""
    return sum(turn.cost for turn in episode.turns)
