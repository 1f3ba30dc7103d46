"""Patterns of behaviour: what the report looks for in every episode, shipped ones and those of `report.patterns`.

A pattern gives the turns of an episode in which it occurs, numbered from 1; none means that it does not occur.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.agent.model_names import evaluated_domains
from stages.agent.sample_episodes import outcome
from stages.environments.registry import GROUP, load_domain
from stages.evaluation.own_patterns import check_patterns, load_predicate, place
from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.params import OwnPattern, Params

Row = Mapping[str, Any]
"""A row of EPISODE_SCHEMA."""
UNSEEN = "answer_without_search"
IN_A_ROW = 2
"""Refused actions that count as a row."""


@dataclass(frozen=True)
class Pattern:
    name: str
    title: str
    about: str
    find: Callable[[Row], Sequence[int]]
    domains: frozenset[str] | None = None
    """Where it is looked for; None: everywhere."""

    def applies(self, domain: str) -> bool:
        return self.domains is None or domain in self.domains

    def turns(self, row: Row) -> list[int]:
        """The turns in which it occurs, ascending."""
        return sorted(set(self.find(row)))


def loops(row: Row) -> list[int]:
    """Turns whose action was already taken in the same state."""
    return _repeats((turn["state_key"], turn["action_key"]) for turn in row["turns"])


def repeated_queries(row: Row) -> list[int]:
    """Turns with an accepted action and a result that already occurred together."""
    return _repeats((turn["action_key"], turn["observation"]) if turn["accepted"] else None for turn in row["turns"])


def _repeats(keys: Iterable[tuple[str, str] | None]) -> list[int]:
    seen: set[tuple[str, str]] = set()
    found = []
    for number, key in enumerate(keys, start=1):
        if key in seen:
            found.append(number)
        if key is not None:
            seen.add(key)
    return found


def refused_in_a_row(row: Row) -> list[int]:
    """Turns that are at least the second of consecutive refused actions."""
    found, length = [], 0
    for number, turn in enumerate(row["turns"], start=1):
        length = 0 if turn["accepted"] else length + 1
        if length >= IN_A_ROW:
            found.append(number)
    return found


def gave_up(row: Row) -> list[int]:
    """The last turn of an episode that ended by its own rules, before any limit, without success."""
    return [len(row["turns"])] if row["terminated"] and row["turns"] and outcome(row) == "failure" else []


def ran_out(row: Row) -> list[int]:
    """The last turn of an episode that a limit cut."""
    return [max(len(row["turns"]), 1)] if outcome(row) == "truncated" else []


def answers_unseen(answer: Callable[[str], str | None]) -> Callable[[Row], list[int]]:
    """Finds the turn of an answer before which no other action was accepted. `answer`: of an action, None if it is none."""

    def find(row: Row) -> list[int]:
        for number, turn in enumerate(row["turns"], start=1):
            if answer(turn["action"]) is not None:
                return [number]
            if turn["accepted"]:
                return []
        return []

    return find


SHIPPED = (
    Pattern("loop", "Loop", "The same action again in the same state.", loops),
    Pattern("repeated_query", "Repeated query", "An accepted action again, with the result it had before.", repeated_queries),
    Pattern("refused_in_a_row", "Refused in a row", "Two or more refused actions in a row.", refused_in_a_row),
    Pattern("gave_up", "Gave up before the limit", "A failure that ended by the task's own rules, with turns left.", gave_up),
    Pattern("ran_out", "Cut by a limit", "Turns, context or length ran out before the task ended.", ran_out),
)
"""Looked for in every domain; `answer_without_search` joins them in domains that have answers."""


def answer_without_search(domain: str, answer: Callable[[str], str | None]) -> Pattern:
    about = "The answer is the first accepted action."
    return Pattern(UNSEEN, "Answer without search", about, answers_unseen(answer), frozenset([domain]))


def own_pattern(name: str, given: OwnPattern) -> Pattern:
    """A pattern of `report.patterns`. Raises ParamsError if its predicate can't be imported."""
    domains = frozenset(given.domains) or None
    title = name.replace("_", " ").capitalize()
    if given.predicate is None:
        return Pattern(name, title, given.about or f"{given.where} matches {given.regex}", _matches(given), domains)
    predicate = _checked(load_predicate(name, given.predicate), place(name, "predicate"))
    return Pattern(name, title, given.about or f"{given.predicate} says so", predicate, domains)


def _matches(given: OwnPattern) -> Callable[[Row], list[int]]:
    wanted = re.compile(given.regex or "")

    def find(row: Row) -> list[int]:
        texts = [turn[given.where] for turn in row["turns"]] if given.where != "message" else policy_messages(row)
        return [number for number, text in enumerate(texts, start=1) if wanted.search(text)]

    return find


def policy_messages(row: Row) -> list[str]:
    """The policy's messages, one per turn."""
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def _checked(predicate: Callable[[Row], Any], place: str) -> Callable[[Row], Sequence[int]]:
    """`predicate` with its result as turns; True is the last turn. Raises ParamsError for an exception or another result."""

    def find(row: Row) -> Sequence[int]:
        terms, last = row["reward_terms"], max(len(row["turns"]), 1)
        given = {**row, "reward_terms": json.loads(terms) if isinstance(terms, str) else terms}
        try:
            found = predicate(given)
        except Exception as error:
            raise ParamsError(f"{place}: {type(error).__name__} in episode {row['episode_id']}: {error}") from error
        if isinstance(found, bool):
            return [last] if found else []
        turns = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else [found]
        if not all(isinstance(turn, int) and 1 <= turn <= last for turn in turns):
            raise ParamsError(
                f"{place}: returned {found!r} for episode {row['episode_id']}; return True, False or turns from 1 to {last}"
            )
        return turns

    return find


def patterns_of(params: Params) -> list[Pattern]:
    """The shipped patterns that apply to the evaluated domains, then the run's own ones. Raises ParamsError as
    `check_patterns`."""
    domains, found = evaluated_domains(params), list(SHIPPED)
    check_patterns(params.report.patterns, domains)
    for domain in domains:
        if domain in GROUP.points():
            answer = getattr(load_domain(domain, params.per_domain[domain].environment), "answer", None)
            found += [] if answer is None else [answer_without_search(domain, answer)]
    return [*found, *(own_pattern(name, given) for name, given in params.report.patterns.items())]
