"""The monitor of a behaviour formula: which states may come next, and how far it is to the end.

Its position is a stack of what is still to come. Everything is a pure function of the position, an immutable value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stages.constraints.formula import Formula, Loop, Next, Or, Spec, State

Position = tuple[tuple[Formula, int], ...]
"""What is to come, the next last; the number is of a loop's repetitions so far. (): the formula is fulfilled."""


@dataclass(frozen=True)
class Monitor:
    """The positions of one specification."""

    spec: Spec

    @property
    def start(self) -> Position:
        return ((self.spec.behaviour, 0),)

    def valid(self, position: Position) -> tuple[str, ...]:
        """The states that may come next, exits of loops first."""
        return tuple(dict.fromkeys(_first(position)))

    def step(self, position: Position, state: str) -> Position:
        """The position after `state`. Raises ValueError if that may not come next."""
        if state not in _first(position):
            raise ValueError(f"{state} may not come here; valid: {', '.join(self.valid(position)) or 'nothing more'}")
        return _step(position, state)

    def fulfilled(self, position: Position) -> bool:
        """Whether the transcript may end here."""
        return all(isinstance(formula, Loop) and formula.exit is None and count >= formula.least for formula, count in position)

    def choices(self, position: Position) -> tuple[str, ...]:
        """The policy's states among `valid`."""
        return tuple(state for state in self.valid(position) if not self.spec.states[state].env)

    def answers(self, position: Position) -> tuple[str, ...]:
        """The environment's states among `valid`."""
        return tuple(state for state in self.valid(position) if self.spec.states[state].env)

    def turns_to_end(self, position: Position) -> float:
        """The fewest answers of the environment before the formula is fulfilled."""
        return sum(_least(formula, count, self._answers_in) for formula, count in position)

    def _answers_in(self, state: str) -> float:
        return float(self.spec.states[state].env)

    def cost_to_pause(self, position: Position, costs: Mapping[str, float]) -> float:
        """The least cost of the policy's states before its turn may end: an answer of the environment is due, or the formula is
        fulfilled. costs: of each state of the policy."""

        def through(state: str) -> float:
            return math.inf if self.spec.states[state].env else costs[state]

        def pause(formula: Formula, count: int) -> float:
            if isinstance(formula, State):
                return 0.0 if self.spec.states[formula.name].env else math.inf
            if isinstance(formula, Or):
                return min(pause(part, 0) for part in formula.parts)
            if isinstance(formula, Next):
                best, before = math.inf, 0.0
                for part in formula.parts:
                    best, before = min(best, before + pause(part, 0)), before + _least(part, 0, through)
                return best
            more = pause(formula.body, 0) if count < formula.most else math.inf
            if formula.exit is None:
                return more
            left = max(formula.least - count, 0)
            return min(more, (left * _least(formula.body, 0, through) if left else 0.0) + pause(formula.exit, 0))

        best, before = math.inf, 0.0
        for formula, count in reversed(position):
            best, before = min(best, before + pause(formula, count)), before + _least(formula, count, through)
        return min(best, before)


def _least(formula: Formula, count: int, cost: Callable[[str], float]) -> float:
    """The least total cost of the states that a formula needs; `count`: repetitions of a loop so far."""
    if isinstance(formula, State):
        return cost(formula.name)
    if isinstance(formula, Or):
        return min(_least(part, 0, cost) for part in formula.parts)
    if isinstance(formula, Next):
        return sum(_least(part, 0, cost) for part in formula.parts)
    left = max(formula.least - count, 0)
    exit_cost = 0.0 if formula.exit is None else _least(formula.exit, 0, cost)
    return (left * _least(formula.body, 0, cost) if left else 0.0) + exit_cost


def _first(position: Position) -> list[str]:
    """The states that `position` admits next. A body of a loop that consumes nothing is not entered again: that could go on for
    ever, and leads to no other state than leaving the loop."""
    if not position:
        return []
    rest, (formula, count) = position[:-1], position[-1]
    if isinstance(formula, State):
        return [formula.name]
    if isinstance(formula, Or):
        return [state for part in formula.parts for state in _first((*rest, (part, 0)))]
    if isinstance(formula, Next):
        return _first((*rest, *((part, 0) for part in reversed(formula.parts))))
    leaving = [] if count < formula.least else _first(rest) if formula.exit is None else [formula.exit.name]
    return leaving + ([] if count >= formula.most else _first((*rest, (formula, formula.most), (formula.body, 0))))


def _step(position: Position, state: str) -> Position:
    """The position after `state`, which is among `_first`; where several parts admit it, the first one takes it."""
    rest, (formula, count) = position[:-1], position[-1]
    if isinstance(formula, State):
        return rest
    if isinstance(formula, Or):
        taken = next(part for part in formula.parts if state in _first((*rest, (part, 0))))
        return _step((*rest, (taken, 0)), state)
    if isinstance(formula, Next):
        return _step((*rest, *((part, 0) for part in reversed(formula.parts))), state)
    if count >= formula.least:
        if formula.exit is not None and state == formula.exit.name:
            return rest
        if formula.exit is None and state in _first(rest):
            return _step(rest, state)
    body: Position = ((formula.body, 0),)
    if state in _first(body):
        return (*rest, (formula, count + 1), *_step(body, state))
    return _step((*rest, (formula, formula.most)), state)  # the repetitions that are left consume nothing
