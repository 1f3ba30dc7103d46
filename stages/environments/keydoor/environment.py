"""Plays one world."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stages.environments.base_environment import EpisodeEnvironment, EpisodeState
from stages.environments.keydoor.world import State, World
from stages.environments.protocol import Observation, Step
from stages.records.actions import action_key
from stages.records.task import Task

NOTHING = "nothing happens."
WON = "you win."
_DONE = {"take": "taken.", "unlock": "unlocked.", "drop": "dropped."}


@dataclass(frozen=True, kw_only=True)
class KeydoorState(EpisodeState):
    """`terminated`: the world is won."""

    world: State


class KeydoorEnvironment(EpisodeEnvironment[KeydoorState]):
    """One running world. `progress_reward`: the part of the return paid for sub-goals."""

    name = "keydoor"

    def __init__(self, max_turns: int, progress_reward: float = 0.0) -> None:
        super().__init__(max_turns)
        self._share = progress_reward

    def _start(self, task: Task) -> tuple[KeydoorState, str]:
        if self._task is None or self._task.spec != task.spec:
            self._world = World.from_spec(task.spec)
        state = KeydoorState(task_id=task.task_id, world=self._world.initial())
        return state, self._world.describe(state.world)

    def step(self, action: str) -> Step:
        state = self._running()
        after = self._after(action)
        world = after if after is not None else state.world
        now = self._end_turn(replace(state, world=world, terminated=world.won))
        return Step(
            observation=Observation(self._shown(action, after)),
            reward=step_reward(self._world, state.world, world, self._share),
            accepted=after is not None,
            terminated=world.won,
            truncated=now.truncated,
            cost=1.0,
            terms={"won": float(world.won), "subgoals": self._gained(state.world, world)},
        )

    def _gained(self, before: State, after: State) -> float:
        """By how much of all sub-goals a step changed what is reached, so that the steps of an episode sum to its share."""
        return (self._world.reached(after) - self._world.reached(before)) / self._world.subgoals

    def _after(self, action: str) -> State | None:
        """The world's state after `action`; None if it is not possible."""
        return self._world.after(self._state.world, action)

    def _shown(self, action: str, after: State | None) -> str:
        """The result of the action, then the surroundings."""
        if after is None:
            return f"{NOTHING} {self._world.describe(self._state.world)}"
        if after.won:
            return WON
        done = _DONE.get(action_key(action).partition(" ")[0])
        return f"{done} {self._world.describe(after)}" if done else self._world.describe(after)

    def state_key(self) -> str:
        """The task and `State.key`: the room, the items held and the doors opened."""
        return f"{self.task.task_id}#{self._state.world.key}"

    def _expert_action(self) -> str | None:
        """The first action of the shortest way to win."""
        return self._world.shortest(self._state.world)

    def _actions(self) -> Iterable[str]:
        """Everything that is possible now: `look`, and whatever would change the world."""
        return self._world.moves(self._state.world)


def step_reward(world: World, before: State, after: State, share: float) -> float:
    """`share` / sub-goals for each sub-goal that the step reached, and 1 - `share` for winning: a won episode returns 1."""
    return share * (world.reached(after) - world.reached(before)) / world.subgoals + (1.0 - share) * after.won
