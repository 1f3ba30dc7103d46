"""Playing one item: calculate, as often as wanted or never, then answer. All state is a few Python values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stages.environments.base_environment import AnsweringEnvironment, AnswerState
from stages.environments.calculator.expression import (
    MAX_DIGITS,
    OPERATORS,
    Expression,
    Operation,
    apply,
    needed,
    next_operation,
    operations,
    parse,
    simplify,
    value,
    write,
)
from stages.environments.calculator.scoring import digit_share, exact_match, normalize
from stages.environments.protocol import Observation, Step
from stages.records.task import Task

USAGE = "Use: key <number><+, - or *><number> or answer <number>."
_OPERATION = re.compile(rf"\(?(-?\d{{1,{MAX_DIGITS}}})\)?\s*([+*-])\s*\(?(-?\d{{1,{MAX_DIGITS}}})\)?")


@dataclass(frozen=True)
class CalculatorState(AnswerState):
    """Everything that changes while an item is played."""

    known: tuple[tuple[str, int], ...] = ()
    """Operations that the tool has done, written out, with their results, in the order they were first done."""


class CalculatorEnvironment(AnsweringEnvironment[CalculatorState]):
    """One running item."""

    name = "calculator"
    usage = USAGE

    def __init__(self, reward: str, max_turns: int, *, show_rest: bool = False) -> None:
        super().__init__(max_turns)
        self._reward = reward
        self._show_rest = show_rest

    def _start(self, task: Task) -> tuple[CalculatorState, str]:
        self._expression: Expression = parse(task.spec["expression"])
        self._needed = needed(self._expression)
        return CalculatorState(task.task_id), ""

    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        return {"key": self._calculate}

    def _calculate(self, text: str) -> Step | None:
        """The result of one operation; None if `text` is not one."""
        match = _OPERATION.fullmatch(text)
        if match is None:
            return None
        left, operator, right = int(match[1]), match[2], int(match[3])
        result = apply(operator, left, right)
        written = write(Operation(operator, left, right))
        known, before = {**dict(self._state.known), written: result}, self._given()
        self._state = replace(self._state, known=tuple(known.items()))
        shown = simplify(self._expression, known) if self._show_rest and written in self._needed else result
        text, reward = f"= {shown if isinstance(shown, int) else write(shown)}", self._given() - before
        return Step(Observation(text), reward, accepted=True, terminated=False, truncated=False, cost=1.0)

    def _given(self) -> float:
        """Reward given so far for operations worked out; in 1024ths, so that returns add up exactly."""
        if self._reward != "progress" or not self._needed:
            return 0.0
        done = dict(self._state.known)
        return (512 * sum(one in done for one in self._needed) // len(self._needed)) / 1024

    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        """Terms: `worked` is the share of the operations that need the tool and got it."""
        gold = self.task.spec["answer"]
        done = dict(self._state.known)
        terms = {
            "exact_match": exact_match(answer or "", gold),
            "digits": digit_share(answer or "", gold),
            "worked": sum(one in done for one in self._needed) / len(self._needed) if self._needed else 1.0,
        }
        if self._reward == "progress":
            return (1.0 - self._given()) * terms["exact_match"], terms
        return terms[self._reward], terms

    def state_key(self) -> str:
        """The operations done, sorted, and the normalised answer if one was given."""
        return self._key("|".join(sorted(operation for operation, _ in self._state.known)), normalize)

    def next_action(self) -> str | None:
        """The next operation that can't be read off, or else the answer; None once the episode is over."""
        if self._state.over:
            return None
        rest = simplify(self._expression, dict(self._state.known))
        operation = next_operation(rest)
        return f"key {operation}" if operation else f"answer {value(rest)}"

    def admissible(self) -> Sequence[str]:
        """A sample of sensible actions: to answer each number read so far, and to combine each two. Empty once the episode is
        over."""
        if self._state.over:
            return []
        numbers = sorted(_numbers(self._expression) | {result for _, result in self._state.known if abs(result) < 10**MAX_DIGITS})
        actions = {f"answer {number}" for number in numbers}
        used = sorted({operator for operator, _, _ in operations(self._expression)}) or list(OPERATORS)
        actions |= {
            f"key {write(Operation(operator, left, right))}" for operator in used for left in numbers for right in numbers
        }
        return sorted(actions)


def _numbers(expression: Expression) -> set[int]:
    if isinstance(expression, int):
        return {expression}
    return _numbers(expression.left) | _numbers(expression.right)
