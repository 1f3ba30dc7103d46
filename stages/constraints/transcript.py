"""Transcripts of a specification: a turn's text as states and contents, the commands in it, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stages.constraints.formula import Spec, SpecError, StateInfo
from stages.constraints.monitor import Monitor, Position

LONGEST = 12
"""Most states of a turn of a demonstration."""
REACHED = 20_000
"""Positions that are looked at for ambiguous ones."""


@dataclass(frozen=True)
class Reading:
    """A turn, read."""

    parts: tuple[tuple[str, str], ...]
    """(state, content) each, also of those after a violation."""
    position: Position | None
    """After the turn; None after a violation: the rest of the episode is not judged."""
    violation: str = ""
    """Why the turn does not obey the formula; "": it does."""
    at: int = 0
    """With a violation: the characters of the turn before it."""
    outside: str = ""
    """With a violation: the state whose content is not in its closed list, if it is that."""


def option_for(content: str, values: Sequence[str], closest: bool) -> str | None:
    """The entry of a closed list that a content names. closest: compared exactly, then without case, then without white space,
    then as parts of one another; if none fits, the first entry."""
    if content in values or not closest:
        return content if content in values else None

    def plain(text: str) -> str:
        return "".join(text.casefold().split())

    for same in (
        lambda value: value.casefold() == content.casefold(),
        lambda value: plain(value) == plain(content),
        lambda value: bool(content) and (plain(value) in plain(content) or plain(content) in plain(value)),
    ):
        if found := next((value for value in values if same(value)), None):
            return found
    return values[0]


def _filled(template: str, contents: Mapping[str, str]) -> Iterator[str]:
    """The pieces of a template, with contents for {name}; "" for unknown ones."""
    for place, piece in enumerate(re.split(r"{(\w*)}", template)):
        yield contents.get(piece, "") if place % 2 else piece


class Transcripts:
    """Reads and writes the turns of a specification. `closest`: contents outside a closed list are replaced by `option_for`;
    `restarts`: a fulfilled formula begins anew.

    Raises SpecError for a formula in which two answers of the environment are possible at once, or that no turn could obey.
    """

    def __init__(self, spec: Spec, closest: bool = False, restarts: bool = False) -> None:
        self.spec, self.monitor, self.closest, self.restarts = spec, Monitor(spec), closest, restarts
        by_length = sorted((state for state in spec.states.values() if not state.env), key=lambda state: -len(state.text))
        self._opening = {state.text: state for state in by_length}
        within = [re.escape(state.text) for state in by_length if not state.turn]
        self._within = re.compile("|".join(within)) if within else None
        self._sends = any(state.send for state in by_length)
        self._check_positions()

    def _check_positions(self) -> None:
        first: tuple[Position, str] = self.monitor.start, ""
        waiting, seen = [first], {first}
        while waiting and len(seen) < REACHED:
            position, last = waiting.pop()
            if problem := self._problem(position, last):
                raise SpecError(f"{self.spec.name}: {problem}")
            for state in self.monitor.valid(position):
                after = self.monitor.step(position, state), state
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)

    def _problem(self, position: Position, last: str) -> str:
        """What is wrong with a position after the state `last` ("": before the first); "": nothing."""
        answers, choices = self.monitor.answers(position), self.monitor.choices(position)
        if len(answers) > 1:
            return (
                f"after some transcripts the environment may answer with {' or '.join(answers)}; a turn must have one state that "
                f"answers it"
            )
        if not last or self.monitor.fulfilled(position):
            return ""
        if self.spec.states[last].env:
            return "" if choices else f"{answers[0]} comes after {last}, both of the environment; put a turn between them"
        if answers or any(not self.spec.states[name].turn for name in choices):
            return ""
        return (
            f"only {' or '.join(choices)} may come after {last}, within the turn, and its text begins it only at the start of "
            f"one (turn); remove that, or put a state of the environment before it"
        )

    @property
    def start(self) -> Position:
        """The position at the first turn, after the task."""
        return self.answered(self.monitor.start)

    def answered(self, position: Position) -> Position:
        """The position after the environment's answer to a turn that ended at `position`."""
        answers = self.monitor.answers(position)
        return self.monitor.step(position, answers[0]) if answers else position

    def next_turn(self, position: Position | None) -> Position | None:
        """The position at the turn after one that ended at `position`; None after a violation."""
        if position is None:
            return None
        after = self.answered(position)
        return self.start if self.restarts and self.monitor.fulfilled(after) else after

    def may_end(self, position: Position) -> bool:
        """Whether a turn may end here."""
        return bool(self.monitor.answers(position)) or self.monitor.fulfilled(position)

    def segments(self, text: str) -> Iterator[tuple[StateInfo | None, str, int]]:
        """(state, content, the place where its text begins) in order; a state of None for text before the first state."""
        body = text.lstrip()
        first = next((state for begins, state in self._opening.items() if body.startswith(begins)), None)
        starts = [(len(text) - len(body), first)] if first is not None else []
        after = starts[0][0] + len(first.text) if first is not None else 0
        for found in self._within.finditer(text, after) if self._within is not None else ():
            starts.append((found.start(), self._opening[found.group()]))
        if body and (not starts or text[: starts[0][0]].strip()):
            yield None, text[: starts[0][0] if starts else len(text)].strip(), 0
        for number, (place, state) in enumerate(starts):
            assert state is not None
            end = starts[number + 1][0] if number + 1 < len(starts) else len(text)
            yield state, text[place + len(state.text) : end].strip(), place

    def read(self, position: Position | None, text: str) -> Reading:
        """A turn that begins at `position` (None: after a violation)."""
        parts: list[tuple[str, str]] = []
        violation, at, outside = "", 0, ""
        for state, content, place in self.segments(text):
            if state is not None and state.values:
                content = option_for(content, state.values, self.closest) or content
            if position is not None and not violation:
                if state is None:
                    violation, at = f"the turn begins with {content[:20]!r} instead of a state", place
                elif state.name not in self.monitor.choices(position):
                    valid = ", ".join(self.monitor.valid(position)) or "nothing more"
                    violation, at = f"{state.name} where {valid} may come", place
                elif state.values and content not in state.values:
                    violation, at = f"{content[:40]!r} is not among the values of {state.name}", place + len(state.text)
                    outside = state.name
                else:
                    position = self.monitor.step(position, state.name)
            if state is not None:
                parts.append((state.name, content))
        if position is not None and not violation and not (parts and self.may_end(position)):
            violation, at = f"the turn ends before {', '.join(self.monitor.choices(position)) or 'anything'}", len(text)
        return Reading(tuple(parts), None if violation else position, violation, at, outside)

    def commands(self, text: str) -> list[str]:
        """What a turn sends to the environment; the text itself if no state sends something, or if it has none of the states."""
        contents: dict[str, str] = {}
        found = []
        for state, content, _ in self.segments(text):
            if state is None:
                continue
            content = (option_for(content, state.values, self.closest) or content) if state.values else content
            contents[state.name] = content
            if state.send:
                own = {"": content, **contents}
                found.append("".join(_filled(state.send, own)).strip())
        return found if self._sends and contents else [text]

    # ---- demonstrations -----------------------------------------------------------------------------------------------------

    def _paths(self, position: Position, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        """The states of turns that may begin at `position` and send one command."""
        if path and self.may_end(position) and sum(bool(self.spec.states[name].send) for name in path) == 1:
            yield path
        elif len(path) < LONGEST:
            for name in self.monitor.choices(position):
                if not (self.spec.states[name].send and any(self.spec.states[one].send for one in path)):
                    yield from self._paths(self.monitor.step(position, name), (*path, name))

    def write(self, position: Position | None, action: str) -> str | None:
        """A turn that begins at `position` and sends `action`; None if the formula allows none."""
        if position is None:
            return None
        if not self._sends:
            return action if not self.read(position, action).violation else None
        for path in self._paths(position):
            contents = self._contents(path, action)
            if contents is not None:
                lines = (f"{self.spec.states[name].text} {contents.get(name, '')}".strip() for name in path)
                text = "\n".join(lines)
                if not self.read(position, text).violation and self.commands(text) == [action]:
                    return text
        return None

    def _contents(self, path: Sequence[str], action: str) -> dict[str, str] | None:
        """The contents of a turn's states that send `action`."""
        sender = next(self.spec.states[name] for name in path if self.spec.states[name].send)
        pattern = ""
        for place, piece in enumerate(re.split(r"{(\w*)}", sender.send)):
            content = ".+" if piece in ("", sender.name) else r"\S+"
            pattern += f"(?P<{piece or 'own_content'}>{content})" if place % 2 else re.escape(piece)
        found = re.fullmatch(pattern, action, re.DOTALL)
        if found is None:
            return None
        default = {name: (self.spec.states[name].values or (self.spec.states[name].say,))[0] for name in path}
        sent = {sender.name if name == "own_content" else name: text for name, text in found.groupdict().items()}
        return {**default, **sent}
