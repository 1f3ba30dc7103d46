"""Playing one item: calculate, as often as wanted or never, then answer. All state is a few Python values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
from stages.environments.protocol import Observation, Step, Task

USAGE = "Use: key <number><+, - or *><number> or answer <number>."
ANSWERED = "Answered."
_OPERATION = re.compile(rf"\(?(-?\d{{1,{MAX_DIGITS}}})\)?\s*([+*-])\s*\(?(-?\d{{1,{MAX_DIGITS}}})\)?")


@dataclass(frozen=True)
class CalculatorState:
    """Everything that changes while an item is played."""

    task_id: str
    turns: int = 0
    known: tuple[tuple[str, int], ...] = ()
    """Operations that the tool has done, written out, with their results, in the order they were first done."""
    answer: str | None = None
    truncated: bool = False


class CalculatorEnvironment:
    """One running item."""

    def __init__(self, reward: str, max_turns: int, *, show_rest: bool = False) -> None:
        self._reward = reward
        self._max_turns = max_turns
        self._show_rest = show_rest
        self._task: Task | None = None
        self._verbs: dict[str, Callable[[str], Step | None]] = {"key": self._calculate, "answer": self._answer}

    @property
    def task(self) -> Task:
        """The task being played. Raises RuntimeError before the first reset."""
        if self._task is None:
            raise RuntimeError("the calculator environment was never reset; call reset(task) first")
        return self._task

    def reset(self, task: Task) -> Observation:
        self._expression: Expression = parse(task.spec["expression"])
        self._needed = needed(self._expression)
        self._task = task
        self._state = CalculatorState(task.task_id)
        return Observation("")

    def step(self, action: str) -> Step:
        state = self._state if self._task is not None else None
        if state is None or state.answer is not None or state.truncated:
            raise RuntimeError(
                "the calculator episode is over or was never reset; call reset(task) or restore(state) before step()"
            )
        self._state = replace(state, turns=state.turns + 1)
        verb, _, argument = action.strip().partition(" ")
        perform = self._verbs.get(verb.lower())
        step = perform(argument.strip()) if perform and argument.strip() else None
        if step is None:
            step = Step(Observation(USAGE), 0.0, accepted=False, terminated=False, truncated=False)
        if step.terminated:
            return step
        if self._state.turns >= self._max_turns:
            self._state = replace(self._state, truncated=True)
            return replace(step, truncated=True, terms=self._terms(None))
        return step

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

    def _answer(self, text: str) -> Step:
        self._state = replace(self._state, answer=text)
        terms = self._terms(text)
        left = 1.0 - self._given()
        reward = left * terms["exact_match"] if self._reward == "progress" else terms[self._reward]
        return Step(Observation(ANSWERED), reward, accepted=True, terminated=True, truncated=False, terms=terms)

    def _given(self) -> float:
        """Reward given so far for operations worked out; in 1024ths, so that returns add up exactly."""
        if self._reward != "progress" or not self._needed:
            return 0.0
        done = dict(self._state.known)
        return (512 * sum(one in done for one in self._needed) // len(self._needed)) / 1024

    def _terms(self, answer: str | None) -> dict[str, float]:
        """Reward terms at the end of an episode; `worked` is the share of the operations that need the tool and got it."""
        gold = self.task.spec["answer"]
        done = dict(self._state.known)
        return {
            "exact_match": exact_match(answer or "", gold),
            "digits": digit_share(answer or "", gold),
            "worked": sum(one in done for one in self._needed) / len(self._needed) if self._needed else 1.0,
        }

    def snapshot(self) -> CalculatorState:
        if self._task is None:
            raise RuntimeError("the calculator environment was never reset; call reset(task) before snapshot()")
        return self._state

    def restore(self, state: CalculatorState) -> None:
        """Raises ValueError for a snapshot of another task."""
        if state.task_id != self.task.task_id:
            raise ValueError(f"snapshot of task {state.task_id} can't be restored into task {self.task.task_id}; reset first")
        self._state = state

    def state_key(self) -> str:
        """The operations done, sorted, and the normalised answer if one was given."""
        task = self.task
        done = "|".join(sorted(operation for operation, _ in self._state.known))
        return f"{task.task_id}#{done}" + ("" if self._state.answer is None else f"#{normalize(self._state.answer)}")

    def next_action(self) -> str | None:
        """The next operation that can't be read off, or else the answer; None once the episode is over."""
        if self._state.answer is not None or self._state.truncated:
            return None
        rest = simplify(self._expression, dict(self._state.known))
        operation = next_operation(rest)
        return f"key {operation}" if operation else f"answer {value(rest)}"

    def admissible(self) -> Sequence[str]:
        """A sample of sensible actions: to answer each number read so far, and to combine each two. Empty once the episode is
        over."""
        if self._state.answer is not None or self._state.truncated:
            return []
        numbers = sorted(_numbers(self._expression) | {result for _, result in self._state.known if abs(result) < 10**MAX_DIGITS})
        actions = {f"answer {number}" for number in numbers}
        used = sorted({operator for operator, _, _ in operations(self._expression)}) or list(OPERATORS)
        actions |= {
            f"key {write(Operation(operator, left, right))}" for operator in used for left in numbers for right in numbers
        }
        return sorted(actions)

    def close(self) -> None:
        self._task = None


def _numbers(expression: Expression) -> set[int]:
    if isinstance(expression, int):
        return {expression}
    return _numbers(expression.left) | _numbers(expression.right)
