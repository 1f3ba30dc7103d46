"""Plays one problem: programs are run on shown and hidden tests, and may be repaired if there are turns left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stages.environments.base_environment import EpisodeEnvironment, EpisodeState
from stages.environments.code.settings import Rewards
from stages.environments.protocol import Observation, Step
from stages.records.task import Task
from stages.sandbox import Outcome, Program, Sandbox, TestResult, Tests
from stages.seeding import key64

RESULTS = ("pass", "fail", "error", "compile_error")
CACHED = 4096
"""Number of programs whose outcomes are cached, since search and repair return to the same programs."""
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.S)
_EQUATION = re.compile(r"assert (.+?) == (.+)", re.S)


@dataclass(frozen=True)
class CodeState(EpisodeState):
    """`terminated`: the last program passes all shown tests."""

    programs: tuple[str, ...] = ()
    """Submitted programs that compile."""


class Judge:
    """Runs programs on tasks' tests in the sandbox that all environments of a domain share, and caches the outcomes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._outcomes: dict[tuple[str, str], Outcome] = {}

    def outcome(self, task: Task, source: str) -> Outcome:
        """The outcome of a program on all tests of `task`, shown ones first. Raises SandboxError if there is no sandbox."""
        spec, key = task.spec, (task.task_id, source)
        if key not in self._outcomes:
            program = Program(source, spec["entry"], tuple(spec["parameters"]), spec["context"])
            tests = Tests((*spec["shown"], *spec["hidden"]), spec["context"])
            while len(self._outcomes) >= CACHED:
                del self._outcomes[next(iter(self._outcomes))]
            self._outcomes[key] = self.sandbox.run(program, tests)
        return self._outcomes[key]


def result_of(outcome: Outcome) -> str:
    """One of RESULTS; an error on any test takes precedence over a failure."""
    if outcome.status == "compile_error":
        return "compile_error"
    verdicts = {result.verdict for result in outcome.results}
    if outcome.status != "ok" or verdicts & {"error", "timeout"}:
        return "error"
    return "pass" if verdicts <= {"pass"} else "fail"


def unfenced(action: str) -> str:
    """The program in an answer: its last code block, or all of it."""
    blocks = _FENCE.findall(action)
    return blocks[-1] if blocks else action


def failure_text(test: str, result: TestResult) -> str:
    """Describes a failed test: "f([1, 2]) is 3, not 2"."""
    if result.verdict != "fail":
        return f"{result.call}: {result.message}" if result.call else result.message
    equation = _EQUATION.fullmatch(test)
    if equation and equation[1] == result.call:
        return f"{result.call} is {result.value}, not {equation[2]}"
    return f"{result.message}, {result.call} is {result.value}" if result.call else result.message


class CodeEnvironment(EpisodeEnvironment[CodeState]):
    """One running problem. `name` is its domain's."""

    def __init__(self, name: str, judge: Judge, rewards: Rewards, max_turns: int, styles: Sequence[str]) -> None:
        super().__init__(max_turns)
        self.name = name  # type: ignore[misc]
        self._judge, self._rewards, self._styles = judge, rewards, styles

    def _start(self, task: Task) -> tuple[CodeState, str]:
        return CodeState(task.task_id), ""

    def step(self, action: str) -> Step:
        """Submit a program: a module that defines the function, its body, or the expression it returns."""
        state = self._running()
        source = unfenced(action)
        outcome = self._judge.outcome(self.task, source)
        result, shown = result_of(outcome), len(self.task.spec["shown"])
        programs = state.programs if result == "compile_error" else (*state.programs, source)
        wrong = next((place for place, one in enumerate(outcome.results[:shown]) if one.verdict != "pass"), None)
        ready = outcome.status == "ok" and wrong is None
        now = self._end_turn(replace(state, programs=programs, terminated=ready))
        if outcome.status != "ok":
            text = outcome.message
        else:
            text = (
                ("passed." if result == "pass" else "failed.")
                if wrong is None
                else failure_text(self.task.spec["shown"][wrong], outcome.results[wrong])
            )
        if not now.over:
            return Step(Observation(text), 0.0, result != "compile_error", terminated=False, truncated=False, cost=1.0)
        return Step(
            observation=Observation(text),
            reward=self._rewards.of(result),
            accepted=result != "compile_error",
            # With a single turn, any submission ends the task.
            terminated=ready or self._max_turns == 1,
            truncated=now.truncated and self._max_turns > 1,
            cost=1.0,
            terms=self._terms(outcome, result),
        )

    def _terms(self, outcome: Outcome, result: str) -> dict[str, float]:
        """1 for one of RESULTS; `tests`: share of the hidden tests that passed."""
        hidden = outcome.results[len(self.task.spec["shown"]) :]
        share = sum(one.verdict == "pass" for one in hidden) / len(self.task.spec["hidden"])
        return {**{name: float(name == result) for name in RESULTS}, "tests": share}

    def state_key(self) -> str:
        """The submitted programs, up to white space."""
        return "#".join((self.task.task_id, *(" ".join(source.split()) for source in self._state.programs)))

    def _expert_action(self) -> str:
        """A reference solution in the task's style."""
        by_style = {one["style"]: one["source"] for one in self.task.spec["references"]}
        known = [style for style in self._styles if style in by_style] or sorted(by_style)
        return by_style[known[key64("code.style", self.task.task_id) % len(known)]]

    def _actions(self) -> list[str]:
        """A sample: the task's solutions and the near misses that compile."""
        spec = self.task.spec
        misses = [one["source"] for one in spec["near_misses"] if one["outcome"] != "compile_error"]
        return [*(one["source"] for one in spec["references"]), *misses]
