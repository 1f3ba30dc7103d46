"""The rules of self-play on a domain whose episodes end with `answer <text>` (Search Self-Play, arXiv 2510.18821).

`task.spec["role"]` selects them. proposer: the domain's tools, then `question <text>`, which ends the episode; it may not answer.
reader: one turn, `answer <text>`, without tools. No role, the solver: the domain's own rules. The spec has what the domain needs
for one of its tasks; proposer and reader are told the answer or the evidence by their prompts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.environments.protocol import Environment, Observation, Step, tell_logprobs
from stages.records.task import Task

PROPOSER, READER = "proposer", "reader"
PROPOSED = "Proposed."
PROPOSER_USAGE = "Search, then write question <text>."
MARKS_TERM = "answer_marks"
"""Term of a solver's last step: how often the word `answer` stands in its actions."""
_MARK = re.compile(r"\banswer\b", re.IGNORECASE)


@dataclass(frozen=True)
class SelfPlayState:
    """A snapshot: the domain's, whether a question or a reader's turn ended the episode, and the marks so far."""

    inner: Any
    over: bool
    marks: int


class SelfPlayEnvironment:
    """An environment of the domain, with further roles."""

    def __init__(self, inner: Environment) -> None:
        self.inner, self._role, self._over, self._marks = inner, "", True, 0

    def reset(self, task: Task) -> Observation:
        self._role, self._over, self._marks = str(task.spec.get("role", "")), False, 0
        return self.inner.reset(task)

    def step(self, action: str) -> Step:
        if self._over:
            raise RuntimeError("the episode is over or was never reset; call reset(task) before step()")
        if self._role == PROPOSER:
            return self._propose(action)
        if self._role == READER:
            return self._read(action)
        self._marks += len(_MARK.findall(action))
        step = self.inner.step(action)
        return replace(step, terms={**step.terms, MARKS_TERM: float(self._marks)}) if step.done else step

    def drawn(self, logprobs: Sequence[float]) -> None:
        """See stages.environments.protocol.tell_logprobs."""
        tell_logprobs(self.inner, logprobs)

    def _propose(self, action: str) -> Step:
        if proposed_question(action):
            self._over = True
            return Step(Observation(PROPOSED), 0.0, accepted=True, terminated=True, truncated=False)
        invalid = action.strip().partition(" ")[0].lower() in ("answer", "question")
        step = self.inner.step("" if invalid else action)
        text = step.observation if step.accepted else Observation(PROPOSER_USAGE)
        return replace(step, observation=text, reward=0.0, terms={})

    def _read(self, action: str) -> Step:
        self._over = True
        if action.strip().partition(" ")[0].lower() == "answer":
            step = self.inner.step(action)
            if step.terminated:
                return replace(step, terms={})
        return Step(Observation("No answer."), 0.0, accepted=False, terminated=True, truncated=False)

    def snapshot(self) -> SelfPlayState:
        return SelfPlayState(self.inner.snapshot(), self._over, self._marks)

    def restore(self, state: SelfPlayState) -> None:
        self.inner.restore(state.inner)
        self._over, self._marks = state.over, state.marks

    def state_key(self) -> str:
        return f"{self._role}:{self.inner.state_key()}" if self._role else self.inner.state_key()

    def admissible(self) -> Sequence[str]:
        if self._over:
            return []
        actions = self.inner.admissible()
        wanted = {PROPOSER: False, READER: True}.get(self._role)
        return [action for action in actions if wanted is None or action.startswith("answer ") == wanted]

    def close(self) -> None:
        self.inner.close()


def proposed_question(action: str) -> str:
    """The text of an action `question <text>` in one line; "" for any other action."""
    verb, _, text = action.strip().partition(" ")
    return " ".join(text.split()) if verb.lower() == "question" else ""
