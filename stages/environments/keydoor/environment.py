"""Playing one world. All state is a few Python values, so snapshots are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.environments.keydoor.world import State, World
from stages.environments.protocol import Observation, Step, Task

NOTHING = "nothing happens."
WON = "you win."
_DONE = {"take": "you take", "unlock": "you unlock", "drop": "you drop"}


@dataclass(frozen=True)
class KeydoorState:
    """Everything that changes while a world is played."""

    task_id: str
    world: State
    turns: int = 0
    truncated: bool = False

    @property
    def over(self) -> bool:
        return self.world.won or self.truncated


class KeydoorEnvironment:
    """One running world. `progress_reward` is the part of the return that is paid for sub-goals."""

    def __init__(self, max_turns: int, progress_reward: float = 0.0) -> None:
        self._max_turns = max_turns
        self._share = progress_reward
        self._task: Task | None = None

    @property
    def task(self) -> Task:
        """The task being played. Raises RuntimeError before the first reset."""
        if self._task is None:
            raise RuntimeError("the keydoor environment was never reset; call reset(task) first")
        return self._task

    def reset(self, task: Task) -> Observation:
        if self._task is None or self._task.spec != task.spec:
            self._world = World.from_spec(task.spec)
        self._task = task
        self._state = KeydoorState(task.task_id, self._world.initial())
        return Observation(self._world.describe(self._state.world))

    def step(self, action: str) -> Step:
        state = self._state if self._task is not None else None
        if state is None or state.over:
            raise RuntimeError("the keydoor episode is over or was never reset; call reset(task) or restore(state) before step()")
        command = " ".join(action.lower().split())
        after = self._world.moves(state.world).get(command)
        world = after if after is not None else state.world
        turns = state.turns + 1
        self._state = KeydoorState(state.task_id, world, turns, truncated=not world.won and turns >= self._max_turns)
        return Step(
            observation=Observation(self._shown(command, after)),
            reward=step_reward(self._world, state.world, world, self._share),
            accepted=after is not None,
            terminated=world.won,
            truncated=self._state.truncated,
            cost=1.0,
            terms={"won": float(world.won), "subgoals": self._world.reached(world) / self._world.subgoals},
        )

    def _shown(self, command: str, after: State | None) -> str:
        """What came of the action, then the surroundings."""
        if after is None:
            return f"{NOTHING} {self._world.describe(self._state.world)}"
        if after.won:
            return WON
        verb, _, name = command.partition(" ")
        done = f"{_DONE[verb]} {name}. " if verb in _DONE else ""
        return done + self._world.describe(after)

    def snapshot(self) -> KeydoorState:
        if self._task is None:
            raise RuntimeError("the keydoor environment was never reset; call reset(task) before snapshot()")
        return self._state

    def restore(self, state: KeydoorState) -> None:
        """Raises ValueError for a snapshot of another task."""
        if state.task_id != self.task.task_id:
            raise ValueError(f"snapshot of task {state.task_id} can't be restored into task {self.task.task_id}; reset first")
        self._state = state

    def state_key(self) -> str:
        """The task, and `State.key`: room, what is carried, which doors are open."""
        return f"{self.task.task_id}#{self._state.world.key}"

    def next_action(self) -> str | None:
        """The first action of the shortest way to win; None once the episode is over."""
        return None if self._state.over else self._world.shortest(self._state.world)

    def admissible(self) -> Sequence[str]:
        """Everything that is possible now, sorted: `look`, and what would change the world. Empty once the episode is over."""
        return [] if self._state.over else list(self._world.moves(self._state.world))

    def close(self) -> None:
        self._task = None


def step_reward(world: World, before: State, after: State, share: float) -> float:
    """`share` / sub-goals for each sub-goal that the step reached, and 1 - `share` for winning: a won episode comes to 1."""
    return share * (world.reached(after) - world.reached(before)) / world.subgoals + (1.0 - share) * after.won
