"""A domain with a constraint: its environment reads the policy's turns as the specification has them, and judges them.

What the turns send (`Transcripts.commands`) reaches the domain's own environment; what violates the constraint is counted as the
reward term `violations`, at most once in an episode, and costs `constraint.penalty`. The expert's actions are written as turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from stages.constraints.monitor import Position
from stages.constraints.settings import Constraint
from stages.constraints.transcript import Transcripts
from stages.environments.protocol import Domain, Environment, Observation, Step, tell_logprobs
from stages.records.task import Task
from stages.runtime.validation import ParamsError, shortened

VIOLATIONS, FULFILLED = "violations", "fulfilled"
"""Reward terms: 1 in the turn that violates the constraint; 1 in the turn with which a formula is fulfilled."""


class ConstrainedEnvironment:
    """An `Environment` around another one."""

    def __init__(self, environment: Environment, constraint: Constraint) -> None:
        self.environment, self.constraint, self.rules = environment, constraint, constraint.rules
        self.position: Position | None = self.rules.start
        """In the formula; None after a violation."""
        self.violated = False
        """Whether a turn of the episode violated the constraint; grammars judge later turns all the same."""

    def reset(self, task: Task) -> Observation:
        self.position, self.violated = self.rules.start, False
        return self.environment.reset(task)

    def drawn(self, logprobs: Sequence[float]) -> None:
        """See `tell_logprobs`. They are those of the turn's text after its first word, and go with its first command."""
        tell_logprobs(self.environment, logprobs)

    def _act(self, commands: Sequence[str]) -> Step:
        """The commands of a turn, one after the other until the episode is over, as one step."""
        step = self.environment.step(commands[0])
        for command in commands[1:]:
            if step.done:
                break
            more = self.environment.step(command)
            names = [*step.terms, *(name for name in more.terms if name not in step.terms)]
            step = replace(
                more,
                observation=Observation(f"{step.observation.text}\n{more.observation.text}".strip()),
                reward=step.reward + more.reward,
                cost=step.cost + more.cost,
                accepted=step.accepted and more.accepted,
                terms={name: step.terms.get(name, 0.0) + more.terms.get(name, 0.0) for name in names},
            )
        return step

    def step(self, action: str) -> Step:
        """Raises ValueError for a content outside a closed list, where on_invalid_value says so."""
        reading = self.rules.read(self.position, action)
        if reading.outside and self.constraint.on_invalid_value == "error":
            raise ValueError(
                f"environment.constraint.on_invalid_value is error: in the turn {shortened(action)}, {reading.violation}; extend "
                f"its closed list, let this stage mask (enforcement, apply), or set on_invalid_value to violation"
            )
        step = self._act(self.rules.commands(action) or [""])
        violated = bool(reading.violation) and not self.violated
        self.violated |= violated
        self.position = self.rules.next_turn(reading.position)
        terms = {**step.terms, VIOLATIONS: float(violated)}
        if isinstance(self.rules, Transcripts) and reading.position is not None:
            fulfilled = self.rules.monitor.fulfilled(reading.position if step.done else self.rules.answered(reading.position))
            terms[FULFILLED] = float(fulfilled)
            if fulfilled and not step.done and self.constraint.terminate_on_restart:
                step = replace(step, terminated=True, observation=Observation(""))
        reward = step.reward - (self.constraint.penalty if violated else 0.0)
        return replace(step, reward=reward, terms=terms)

    def snapshot(self) -> Any:
        return self.environment.snapshot(), self.position, self.violated

    def restore(self, state: Any) -> None:
        inner, self.position, self.violated = state
        self.environment.restore(inner)

    def state_key(self) -> str:
        """The environment's, with the states that may come next, or that the episode violates the constraint."""
        key = self.environment.state_key()
        if self.violated:
            return f"{key} | violated"
        if isinstance(self.rules, Transcripts) and self.position is not None:
            return f"{key} | {' '.join(self.rules.monitor.valid(self.position))}"
        return key

    def written(self, action: str | None) -> str | None:
        """An action of the domain as a turn; None if the formula has no place for it."""
        return None if action is None else self.rules.write(self.position, action)

    def admissible(self) -> Sequence[str]:
        return sorted({turn for action in self.environment.admissible() if (turn := self.written(action)) is not None})

    def close(self) -> None:
        self.environment.close()


class ConstrainedDomain:
    """A `Domain` around another one, whose optional methods it has, too; those about actions speak of turns. Raises ParamsError
    for methods that know the domain's own states alone."""

    def __init__(self, domain: Domain, constraint: Constraint) -> None:
        self.domain, self.constraint = domain, constraint
        self.name, self.settings = domain.name, domain.settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("domain", "constraint"):
            raise AttributeError(name)
        found = getattr(self.domain, name)
        if name == "answer":
            return lambda action: self._answer(found, action)
        if name in ("solution", "quality", "attributes"):
            return lambda task, actions: self._of_actions(found, task, actions)
        if name == "known_actions":
            return lambda task: self._known_actions(found, task)
        if name == "player_action":
            return partial(self._player_action, found)
        if name in ("features", "imagined"):
            raise ParamsError(
                f"params.yaml: in per_domain.{self.name}: annotate.evaluation.model_rollouts continues the domain's own states, "
                f"which have no place in a formula: set it or environment.constraint to null"
            )
        return found

    def _commands(self, turn: str) -> list[str]:
        return self.constraint.rules.commands(turn)

    def _answer(self, answer: Any, action: str) -> Any:
        commands = self._commands(action)
        return answer(commands[-1]) if commands else None

    def _of_actions(self, method: Any, task: Task, actions: Sequence[str]) -> Any:
        return method(task, [command for action in actions for command in self._commands(action)])

    def _known_actions(self, known_actions: Any, task: Task) -> list[tuple[str, float]]:
        """As first turns, without those for which the constraint has no place."""
        rules = self.constraint.rules
        written = ((rules.write(rules.start, action), value) for action, value in known_actions(task))
        return [(turn, value) for turn, value in written if turn is not None]

    def _player_action(self, player_action: Any, player: str, environment: ConstrainedEnvironment, rng: Random) -> str:
        """Raises ParamsError for an action for which the constraint has no place."""
        action = player_action(player, environment.environment, rng)
        turn = environment.written(action)
        if turn is None:
            raise ParamsError(
                f"params.yaml: per_domain.{self.name}.environment.constraint has no place for {shortened(action)}, the action of "
                f"the player '{player}': extend the constraint, or set it to null to make games"
            )
        return turn

    def make(self, folder: Path) -> ConstrainedEnvironment:
        return ConstrainedEnvironment(self.domain.make(folder), self.constraint)

    def expert(self, environment: Environment) -> str | None:
        assert isinstance(environment, ConstrainedEnvironment)
        return environment.written(self.domain.expert(environment.environment))

    def returns(self) -> tuple[float, float]:
        """The smallest and the largest return, the penalty included."""
        low, high = self.domain.returns() if hasattr(self.domain, "returns") else (0.0, 1.0)
        return low - self.constraint.penalty, high
