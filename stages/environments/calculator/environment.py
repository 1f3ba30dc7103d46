"""Plays one item: any number of calculations, then an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

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
    known: tuple[tuple[str, int], ...] = ()
    """(operation, result) of what the tool has calculated, in order of first use."""


class CalculatorEnvironment(AnsweringEnvironment[CalculatorState]):
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
        """The step for one operation; None if `text` is not one."""
        match = _OPERATION.fullmatch(text)
        if match is None:
            return None
        left, operator, right = int(match[1]), match[2], int(match[3])
        result = apply(operator, left, right)
        written = write(Operation(operator, left, right))
        known, before = {**dict(self._state.known), written: result}, self._progress_reward()
        self._state = replace(self._state, known=tuple(known.items()))
        shown = simplify(self._expression, known) if self._show_rest and written in self._needed else result
        text, reward = f"= {shown if isinstance(shown, int) else write(shown)}", self._progress_reward() - before
        return Step(Observation(text), reward, accepted=True, terminated=False, truncated=False, cost=1.0)

    def _progress_reward(self) -> float:
        """Reward so far for calculated operations; in 1024ths, so that returns add up exactly."""
        if self._reward != "progress" or not self._needed:
            return 0.0
        return (512 * self._calculated() // len(self._needed)) / 1024

    def _calculated(self) -> int:
        """How many of the operations that need the tool were calculated."""
        known = dict(self._state.known)
        return sum(one in known for one in self._needed)

    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        """Term `worked`: share of the operations that need the tool and were calculated."""
        gold = self.task.spec["answer"]
        terms = {
            "exact_match": exact_match(answer or "", gold),
            "digits": digit_share(answer or "", gold),
            "worked": self._calculated() / len(self._needed) if self._needed else 1.0,
        }
        if self._reward == "progress":
            return (1.0 - self._progress_reward()) * terms["exact_match"], terms
        return terms[self._reward], terms

    def state_key(self) -> str:
        """The calculated operations, sorted, and the normalised answer if one was given."""
        return self._key("|".join(sorted(operation for operation, _ in self._state.known)), normalize)

    def _expert_action(self) -> str:
        """The next operation that needs the tool, or else the answer."""
        rest = simplify(self._expression, dict(self._state.known))
        operation = next_operation(rest)
        return f"key {operation}" if operation else f"answer {value(rest)}"

    def _actions(self) -> set[str]:
        """A sample of sensible actions: answer each number seen so far, and combine any two."""
        numbers = _numbers(self._expression) | {result for _, result in self._state.known if abs(result) < 10**MAX_DIGITS}
        used = {operator for operator, _, _ in operations(self._expression)} or OPERATORS
        pairs = product(used, numbers, numbers)
        return {f"answer {number}" for number in numbers} | {f"key {write(Operation(*pair))}" for pair in pairs}


def _numbers(expression: Expression) -> set[int]:
    if isinstance(expression, int):
        return {expression}
    return _numbers(expression.left) | _numbers(expression.right)
