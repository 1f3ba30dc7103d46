"""The agent around the model: notes before the task, reminders in observations, and turns for thinking.

A scaffold never changes the task: it adds text to what the agent reads, answers thoughts itself, and passes every action on
unchanged, so that success is comparable between scaffolds. stages/agent/history_window.py limits the history that the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.environments.protocol import Environment, Observation, Step, tell_logprobs
from stages.records.task import Task
from stages.runtime.validation import Count, Section

if TYPE_CHECKING:
    from stages.records.episode import TurnRecord

ASK_PLAN = "First write a plan in one line."
ASK_WHY = "That was not understood. Write in one line why."
GO_ON = "Now act."

THINKING = "#thinking"
"""Suffix of the state key while a thought is expected."""


class Scaffold(Section):
    """The scaffold of evaluated models, by default none: docs/design-search.md."""

    window: Annotated[int, Field(ge=1)] | None = None
    """Most recent turns that the model sees, besides the task; null: all."""
    recall: Literal["none", "action", "task", "both"] = "none"
    """Appended to observations: the action they answer, the task, or both."""
    think: Literal["none", "plan", "reflect", "both"] = "none"
    """Turns in which the model writes without acting: plan: one at the start; reflect: one after each rejected action."""
    note: str = ""
    """Text before every task."""
    max_turns: Count | None = None
    """Turn limit, thoughts included; null: the environment's."""

    def acted(self, turns: Sequence[TurnRecord]) -> list[TurnRecord]:
        """The turns whose actions were played, without thoughts."""
        return [turn for turn in turns if self.think == "none" or not turn.state_key.endswith(THINKING)]

    def brief(self, task: Task) -> Task:
        """The task as the agent reads it."""
        return replace(task, prompt=f"{self.note}\n{task.prompt}") if self.note else task

    def around(self, environment: Environment) -> Environment:
        """Wrap `environment`, if the scaffold adds text or turns to it."""
        plain = self.recall == "none" and self.think == "none"
        return environment if plain else ScaffoldedEnvironment(environment, self)


class ScaffoldedEnvironment:
    """An `Environment` around another one that adds the scaffold's reminders and thinking turns."""

    def __init__(self, environment: Environment, scaffold: Scaffold) -> None:
        self.environment, self.scaffold = environment, scaffold
        self._task = ""
        self._thinking = False

    def reset(self, task: Task) -> Observation:
        observation = self.environment.reset(task)
        self._task = task.prompt
        self._thinking = self.scaffold.think in ("plan", "both")
        return Observation("\n".join(filter(None, (observation.text, ASK_PLAN)))) if self._thinking else observation

    def drawn(self, logprobs: Sequence[float]) -> None:
        if not self._thinking:
            tell_logprobs(self.environment, logprobs)

    def step(self, action: str) -> Step:
        if self._thinking:
            self._thinking = False
            return Step(Observation(self._with_reminder(GO_ON, "")), 0.0, accepted=True, terminated=False, truncated=False)
        step = self.environment.step(action)
        if step.done:
            return step
        text = step.observation.text
        if not step.accepted and self.scaffold.think in ("reflect", "both"):
            self._thinking = True
            return replace(step, observation=Observation(f"{text} {ASK_WHY}"))
        return replace(step, observation=Observation(self._with_reminder(text, action)))

    def _with_reminder(self, text: str, action: str) -> str:
        recall = self.scaffold.recall
        if recall in ("task", "both"):
            text += f" task: {self._task}"
        if recall in ("action", "both") and action:
            text += f" action: {action}"
        return text

    def snapshot(self) -> Any:
        return self.environment.snapshot(), self._thinking

    def restore(self, state: Any) -> None:
        inner, self._thinking = state
        self.environment.restore(inner)

    def state_key(self) -> str:
        return self.environment.state_key() + (THINKING if self._thinking else "")

    def admissible(self) -> Sequence[str]:
        return self.environment.admissible()

    def close(self) -> None:
        self.environment.close()
