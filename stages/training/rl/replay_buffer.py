"""The replay buffer: episodes to learn from again, namely the offline dataset and the newest played episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.records.episode import Episode
from stages.seeding import stream


class ReplayBuffer:
    """Offline episodes stay; played ones are evicted, oldest first, once they exceed `capacity` turns (the newest episode always
    stays). Episodes without a turn are ignored."""

    def __init__(self, offline: Sequence[Episode], capacity: int) -> None:
        self.offline = [episode for episode in offline if episode.turns]
        self.played: list[Episode] = []
        self.capacity = capacity

    @property
    def turns(self) -> int:
        return sum(len(episode.turns) for episode in (*self.offline, *self.played))

    def add(self, episodes: Sequence[Episode]) -> None:
        """Add played episodes."""
        self.played += [episode for episode in episodes if episode.turns]
        total = 0
        for place in range(len(self.played) - 1, -1, -1):
            total += len(self.played[place].turns)
            if total > self.capacity and place + 1 < len(self.played):
                del self.played[: place + 1]
                break

    def draw(self, count: int, *key: object, weights: Sequence[float] | None = None) -> list[Episode]:
        """`count` episodes with replacement, by `weights` (offline episodes first; None: uniformly); the draw depends on these,
        `key` and the contents alone. Raises ValueError if the buffer is empty."""
        episodes = [*self.offline, *self.played]
        if not episodes:
            raise ValueError("the replay buffer is empty: no episode so far has a turn; raise model.max_length")
        return stream("replay", *key).choices(episodes, weights, k=count)

    def state_dict(self) -> dict[str, Any]:
        return {"played": self.played}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.played = list(state["played"])
