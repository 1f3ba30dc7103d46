"""Keydoor continued by a learnt model: the model predicts the next state, which the domain describes in its own words.

What a turn pays follows from the predicted state. A prediction that nothing changes is an action that was not accepted, unless
the agent looks around.
"""

from __future__ import annotations

from stages.environments.keydoor.environment import KeydoorEnvironment, KeydoorState
from stages.environments.keydoor.features import KeydoorFeatures
from stages.environments.keydoor.world import State
from stages.environments.learnt import Imagined, NextState
from stages.environments.protocol import Observation
from stages.records.actions import action_key
from stages.records.task import Task


class ImaginedKeydoor(KeydoorEnvironment):
    """See `stages.environments.learnt`."""

    def __init__(self, max_turns: int, progress_reward: float, features: KeydoorFeatures, model: NextState) -> None:
        super().__init__(max_turns, progress_reward)
        self._features, self._model, self._imagining = features, model, False

    def reset(self, task: Task) -> Observation:
        self._imagining = False
        return super().reset(task)

    def restore(self, state: KeydoorState | Imagined) -> None:  # type: ignore[override]
        self._imagining = isinstance(state, Imagined)
        super().restore(state.state if isinstance(state, Imagined) else state)

    def _after(self, action: str) -> State | None:
        if not self._imagining:
            return super()._after(action)
        now, places = self._state, self._features.places(self.task)
        state, taken = self._features.encoded(places, now.world), self._features.taken(places, now.world, now.turns, action)
        found = self._features.decoded(places, self._model.following(state, taken))
        return found if found != now.world or action_key(action) == "look" else None
