"""Exact state values, action values and advantages of keydoor by dynamic programming, for any policy.

V_t(s) = sum_a pi(a | s, t) Q_t(s, a) and Q_t(s, a) = r(s, a, s') + gamma V_{t+1}(s'), with V = 0 once the world is won or t
reaches the turn limit (backward induction over a finite horizon; Puterman, Markov Decision Processes, 1994, section 4.5). The
turn is part of the state: with few turns left, the same room is worth less. Worlds are deterministic, with some hundred states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stages.environments.keydoor.environment import step_reward
from stages.environments.keydoor.settings import KeydoorSettings
from stages.environments.keydoor.world import State, World
from stages.records.actions import action_key
from stages.records.task import Task

Policy = Callable[[str, int, Sequence[str]], Mapping[str, float]]
"""(state key from `Environment.state_key`, turns taken, admissible actions) -> probability of each action. If they sum to less
than 1, the rest is the probability of an invalid action, which takes a turn and changes nothing."""
_TOLERANCE = 1e-6


def uniform(state_key: str, turn: int, admissible: Sequence[str]) -> dict[str, float]:
    """Every admissible action with the same probability."""
    return dict.fromkeys(admissible, 1.0 / len(admissible))


def from_table(table: Mapping[str, Mapping[str, float]]) -> Policy:
    """The policy estimated from `table` (state key -> action, in any case -> count or probability; invalid actions allowed).
    Uniform in states without counts."""

    def policy(state_key: str, turn: int, admissible: Sequence[str]) -> dict[str, float]:
        counts: defaultdict[str, float] = defaultdict(float)
        for action, count in table.get(state_key, {}).items():
            counts[action_key(action)] += count
        total = sum(counts.values())
        if total <= 0.0:
            return uniform(state_key, turn, admissible)
        return {action: counts[action_key(action)] / total for action in admissible}

    return policy


@dataclass(frozen=True)
class StepValue:
    """The exact values of one step of an episode under a policy."""

    state_key: str
    turn: int
    value: float
    """V_t(s) before the step."""
    q: float
    """Q_t(s, a) of the action taken."""
    advantage: float


class ExactValues:
    """All values of `task` under `policy`, or under the optimal policy if None, with the turn limit and rewards of `settings`.

    Raises ValueError for a policy with negative probabilities, a sum above 1 or actions that are not admissible.
    """

    def __init__(self, task: Task, settings: KeydoorSettings, policy: Policy | None = None, gamma: float = 1.0) -> None:
        self.task, self.settings, self.policy, self.gamma = task, settings, policy, gamma
        self.world = World.from_spec(task.spec)
        self._values: list[dict[State, float]] = [dict.fromkeys(self.world.states, 0.0)]
        """By turns left."""
        for turn in reversed(range(settings.max_turns)):
            self._values.append({state: self._backup(state, turn) for state in self.world.states})

    def _backup(self, state: State, turn: int) -> float:
        moves = self.world.states[state]
        if not moves:
            return 0.0
        qs = {action: self._worth(state, after, turn) for action, after in moves.items()}
        if self.policy is None:
            return max(qs.values())
        chances = self.probabilities(state, turn)
        refused = 1.0 - sum(chances.values())
        return sum(chances[action] * qs[action] for action in chances) + refused * self._worth(state, state, turn)

    def probabilities(self, state: State, turn: int) -> Mapping[str, float]:
        """The policy's probabilities, checked; the optimal policy is uniform over the best actions."""
        moves, key = self.world.states[state], self.state_key(state)
        if self.policy is None:
            qs = {action: self.q(state, turn, action) for action in moves}
            best = [action for action in moves if qs[action] >= max(qs.values()) - _TOLERANCE]
            return dict.fromkeys(best, 1.0 / len(best))
        chances = self.policy(key, turn, tuple(moves))
        total = sum(chances.values())
        if min(chances.values(), default=0.0) < 0.0 or total > 1.0 + _TOLERANCE or not chances.keys() <= moves.keys():
            raise ValueError(
                f"the policy gives {dict(chances)} at {key}; its probabilities of the admissible actions {list(moves)} "
                "must not be negative and must add up to at most 1"
            )
        return chances

    def state_key(self, state: State) -> str:
        return f"{self.task.task_id}#{state.key}"

    def value(self, state: State, turn: int) -> float:
        """V of `state` after `turn` turns; 0 at the turn limit."""
        return self._values[self.settings.max_turns - turn][state]

    def q(self, state: State, turn: int, action: str) -> float:
        """Q of any action, in any case and spacing; an invalid one changes nothing."""
        return self._worth(state, self.world.after(state, action) or state, turn)

    def _worth(self, state: State, after: State, turn: int) -> float:
        reward = step_reward(self.world, state, after, self.settings.progress_reward)
        return reward + self.gamma * self.value(after, turn + 1)

    def episode(self, actions: Sequence[str]) -> list[StepValue]:
        """The exact values along the episode of `actions`, which may be invalid. Raises ValueError for actions after its end."""
        state, steps = self.world.initial(), []
        for turn, action in enumerate(actions):
            if state.won or turn >= self.settings.max_turns:
                raise ValueError(f"task {self.task.task_id}: the episode is over after {turn} of {len(actions)} actions")
            value, q = self.value(state, turn), self.q(state, turn, action)
            steps.append(StepValue(self.state_key(state), turn, value, q, q - value))
            state = self.world.after(state, action) or state
        return steps
