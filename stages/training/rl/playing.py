"""Plays episodes with the policy's current weights; the processes of the run share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.agent.active_episode import EpisodeRequest
from stages.agent.branching import Plan
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.rollout import Labels, collect
from stages.engine.engine import Engine, Sampling
from stages.records.episode import Episode
from stages.training.rl.models import Models


@dataclass(frozen=True)
class Player:
    """What it takes to play. `width`: episodes at once; `max_length`: longest episode in tokens."""

    models: Models
    engine: Engine
    chat: Chat
    pool: EnvironmentPool
    labels: Labels
    width: int
    max_length: int

    def play(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        max_turns: int | None = None,
        plan: Plan | None = None,
    ) -> list[Episode]:
        """The episodes of the requests, sorted by id. Every process must make this call with all requests, and gets all."""
        processes = self.models.processes
        self.models.refresh_player()
        groups = list(dict.fromkeys(request.group_id for request in requests))
        mine = set(groups[processes.index :: processes.count])
        episodes = self._collect([request for request in requests if request.group_id in mine], sampling, max_turns, plan)
        return sorted(processes.gather(episodes), key=lambda episode: episode.episode_id)

    def _collect(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, max_turns: int | None, plan: Plan | None
    ) -> list[Episode]:
        """The episodes of this process's requests."""
        limits: dict[str, Any] = {"max_length": self.max_length, "max_turns": max_turns, "width": self.width}
        return collect(self.engine, self.chat, self.pool, requests, sampling, self.labels, **limits, plan=plan)
