"""What surrounds the model in an agent and needs no weights: what it is told, what it is reminded of, turns in which it only
thinks.

A scaffold never touches the task: it adds text to what the agent reads, answers thoughts itself, and passes every action on as it
is, so that success means the same with any of them. What of its past the model sees is cut in stages/agent/history_window.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from stages.environments.protocol import Environment, Observation, Step
from stages.records.task import Task

if TYPE_CHECKING:
    from stages.records.episode import TurnRecord

ASK_PLAN = "First write a plan in one line."
ASK_WHY = "That was not understood. Write in one line why."
GO_ON = "Now act."

THINKING = "#thinking"
"""What the state's key ends with while a thought is asked for."""

Recall = Literal["none", "action", "task", "both"]
Think = Literal["none", "plan", "reflect", "both"]


@dataclass(frozen=True)
class Scaffold:
    """See `evaluate.scaffold` in params.yaml. The default is the model alone."""

    window: int | None = None
    """Newest turns that the model sees, with the task; None: all."""
    recall: Recall = "none"
    """What observations end with: the action that they answer, the task, or both."""
    think: Think = "none"
    """Turns whose text is kept and not played: one at the start (plan), one after each action that was refused (reflect)."""
    note: str = ""
    """What stands before every task."""
    max_turns: int | None = None
    """Turns that the agent allows itself, thoughts included; None: as many as the environment does."""

    @property
    def talks(self) -> bool:
        """Whether it comes between the environment and the agent."""
        return self.recall != "none" or self.think != "none"

    def acted(self, turns: Sequence[TurnRecord]) -> list[TurnRecord]:
        """The turns that were played, without thoughts."""
        return [turn for turn in turns if self.think == "none" or not turn.state_key.endswith(THINKING)]

    def brief(self, task: Task) -> Task:
        """The task as the agent reads it."""
        return replace(task, prompt=f"{self.note}\n{task.prompt}") if self.note else task

    def around(self, environment: Environment) -> Environment:
        return ScaffoldedEnvironment(environment, self) if self.talks else environment


class ScaffoldedEnvironment:
    """`stages.environments.protocol.Environment` around another one, with what the scaffold says and asks."""

    def __init__(self, environment: Environment, scaffold: Scaffold) -> None:
        self.environment, self.scaffold = environment, scaffold
        self._task = ""
        self._thinking = False

    def reset(self, task: Task) -> Observation:
        observation = self.environment.reset(task)
        self._task = task.prompt
        self._thinking = self.scaffold.think in ("plan", "both")
        return Observation("\n".join(filter(None, (observation.text, ASK_PLAN)))) if self._thinking else observation

    def step(self, action: str) -> Step:
        if self._thinking:
            self._thinking = False
            return Step(Observation(self._reminded(GO_ON, "")), 0.0, accepted=True, terminated=False, truncated=False)
        step = self.environment.step(action)
        if step.done:
            return step
        text = step.observation.text
        if not step.accepted and self.scaffold.think in ("reflect", "both"):
            self._thinking = True
            return replace(step, observation=Observation(f"{text} {ASK_WHY}"))
        return replace(step, observation=Observation(self._reminded(text, action)))

    def _reminded(self, text: str, action: str) -> str:
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
