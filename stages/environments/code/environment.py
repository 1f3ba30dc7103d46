"""Handing in programs: tests that are shown, tests that are not, and, if there are turns, repair."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stages.environments.base_environment import ValueEnvironment
from stages.environments.code.settings import Rewards
from stages.environments.protocol import Observation, Step
from stages.records.task import Task
from stages.sandbox import Outcome, Program, Sandbox, TestResult, Tests
from stages.seeding import key64

RESULTS = ("pass", "fail", "error", "compile_error")
SAID = {"pass": "passed.", "fail": "failed.", "error": "failed.", "compile_error": "failed."}
REMEMBERED = 4096
"""Programs whose outcomes are kept: search and repair come back to the same ones."""
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.S)
_EQUATION = re.compile(r"assert (.+?) == (.+)", re.S)


@dataclass(frozen=True)
class CodeState:
    """Everything that changes while a problem is worked on."""

    task_id: str
    programs: tuple[str, ...] = ()
    """That were handed in and compile."""
    turns: int = 0
    passed: bool = False
    truncated: bool = False

    @property
    def over(self) -> bool:
        return self.passed or self.truncated


class Judge:
    """Runs programs on tasks' tests, in one sandbox for all environments of a domain, and remembers what came of them."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._known: dict[tuple[str, str], Outcome] = {}

    def outcome(self, task: Task, source: str) -> Outcome:
        """Of a program on all tests of `task`, the shown ones first. Raises SandboxError where there is no sandbox."""
        spec, key = task.spec, (task.task_id, source)
        if key not in self._known:
            program = Program(source, spec["entry"], tuple(spec["parameters"]), spec["context"])
            tests = Tests((*spec["shown"], *spec["hidden"]), spec["context"])
            while len(self._known) >= REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = self.sandbox.run(program, tests)
        return self._known[key]


def result_of(outcome: Outcome) -> str:
    """One of RESULTS. An error on any test counts before a failure on any other."""
    if outcome.status == "compile_error":
        return "compile_error"
    verdicts = {result.verdict for result in outcome.results}
    if outcome.status != "ok" or verdicts & {"error", "timeout"}:
        return "error"
    return "pass" if verdicts <= {"pass"} else "fail"


def unfenced(action: str) -> str:
    """The program in an answer: what stands in its last code block, or all of it."""
    blocks = _FENCE.findall(action)
    return blocks[-1] if blocks else action


def told(test: str, result: TestResult) -> str:
    """What a failed test says: "f([1, 2]) is 3, not 2"."""
    if result.verdict != "fail":
        return f"{result.call}: {result.message}" if result.call else result.message
    equation = _EQUATION.fullmatch(test)
    if equation and equation[1] == result.call:
        return f"{result.call} is {result.value}, not {equation[2]}"
    return f"{result.message}, {result.call} is {result.value}" if result.call else result.message


class CodeEnvironment(ValueEnvironment[CodeState]):
    """One running problem. `name` is its domain's."""

    def __init__(self, name: str, judge: Judge, rewards: Rewards, max_turns: int, styles: Sequence[str]) -> None:
        super().__init__(max_turns)
        self.name = name  # type: ignore[misc]
        self._judge, self._rewards, self._styles = judge, rewards, styles

    def _start(self, task: Task) -> tuple[CodeState, str]:
        return CodeState(task.task_id), ""

    def step(self, action: str) -> Step:
        """Hand in a program: a module that defines the function, its body, or the expression it returns."""
        state = self._running()
        source = unfenced(action)
        outcome = self._judge.outcome(self.task, source)
        result, shown = result_of(outcome), len(self.task.spec["shown"])
        programs = state.programs if result == "compile_error" else (*state.programs, source)
        wrong = next((place for place, one in enumerate(outcome.results[:shown]) if one.verdict != "pass"), None)
        ready = outcome.status == "ok" and wrong is None
        turns = state.turns + 1
        self._state = replace(
            state, programs=programs, turns=turns, passed=ready, truncated=not ready and turns >= self._max_turns
        )
        if outcome.status != "ok":
            text = outcome.message
        else:
            text = SAID[result] if wrong is None else told(self.task.spec["shown"][wrong], outcome.results[wrong])
        if not self._state.over:
            return Step(Observation(text), 0.0, result != "compile_error", terminated=False, truncated=False, cost=1.0)
        return Step(
            observation=Observation(text),
            reward=self._rewards.of(result),
            accepted=result != "compile_error",
            # With a single turn, handing in a program is the end of it, whatever it comes to.
            terminated=ready or self._max_turns == 1,
            truncated=self._state.truncated and self._max_turns > 1,
            cost=1.0,
            terms=self._terms(outcome, result),
        )

    def _terms(self, outcome: Outcome, result: str) -> dict[str, float]:
        """One of RESULTS is 1; `tests` is the share of the hidden tests that passed."""
        hidden = outcome.results[len(self.task.spec["shown"]) :]
        share = sum(one.verdict == "pass" for one in hidden) / len(self.task.spec["hidden"])
        return {**{name: float(name == result) for name in RESULTS}, "tests": share}

    def state_key(self) -> str:
        """The programs that were handed in, but for white space."""
        return "#".join((self.task.task_id, *(" ".join(source.split()) for source in self._state.programs)))

    def next_action(self) -> str | None:
        """A reference solution, of the style that the task drew; None once the episode is over."""
        return None if self._state.over else self._reference()

    def _reference(self) -> str:
        by_style = {one["style"]: one["source"] for one in self.task.spec["references"]}
        known = [style for style in self._styles if style in by_style] or sorted(by_style)
        return by_style[known[key64("code.style", self.task.task_id) % len(known)]]

    def admissible(self) -> Sequence[str]:
        """A sample: the task's solutions and the near misses that compile. Empty once the episode is over."""
        if self._state.over:
            return []
        spec = self.task.spec
        misses = [one["source"] for one in spec["near_misses"] if one["outcome"] != "compile_error"]
        return sorted({one["source"] for one in spec["references"]} | set(misses))
