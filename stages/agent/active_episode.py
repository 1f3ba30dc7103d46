"""An episode while it is played."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from stages.environments.protocol import Environment
from stages.records.episode import Episode
from stages.records.task import Task


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to play. Episodes with the same `group_id` are attempts at the same task. `role`: who plays it, where roles are
    distinguished."""

    task: Task
    attempt: int
    group_id: str
    role: str = ""
    guidance: str = ""
    """A hint at the end of the first message (stages/agent/guidance.py)."""

    @property
    def prompt_key(self) -> str:
        """Equal for requests with the same first message."""
        return f"{self.task.task_id}\n{self.guidance}"

    @property
    def episode_id(self) -> str:
        return f"{self.task.task_id}/{self.attempt:04d}"


@dataclass
class BranchPoint:
    """The state after one of an episode's turns and its observation, from which a branch can start."""

    snapshot: Any
    """The environment's; None if the episode ended here."""
    state_key: str
    terms: dict[str, float]
    tokens: int


@dataclass
class ActiveEpisode:
    """An episode in progress, with its environment and engine session."""

    request: EpisodeRequest
    episode: Episode
    environment: Environment
    state_key: str = ""
    session: int = -1
    turn: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    row: int = 0
    """Its number in a group that is played in rounds."""
    branch_points: list[BranchPoint] = field(default_factory=list)
    """One after each turn, if the group may still branch."""
    entropies: list[tuple[float, ...]] = field(default_factory=list)
    """Of each turn's tokens, if the plan requests them."""
    snapshot: Any = None
    """Of a branch that has not started: the environment state to restore."""
    held: list[int] = field(default_factory=list)
    """Tokens of the newest observation; the engine gets them with the next request."""

    @property
    def over(self) -> bool:
        return self.episode.terminated or self.episode.truncated

    def branch_from(self, parent: ActiveEpisode, turns: int) -> None:
        """Continue from `parent`'s state after its first `turns` turns. The environment is restored later, from `snapshot`."""
        source, branch, point = parent.episode, self.episode, parent.branch_points[turns - 1]
        branch.parent, branch.inherited = source.episode_id, turns
        for name in ("token_ids", "owner", "logprob", "turn", "kept"):
            setattr(branch, name, getattr(source, name)[: point.tokens])
        branch.turns = [replace(turn) for turn in source.turns[:turns]]
        branch.reward = sum(turn.reward for turn in branch.turns)
        messages = 1 + sum(len(turn_messages("", turn.observation)) for turn in branch.turns)
        branch.messages = [dict(message) for message in source.messages[:messages]]
        self.turn, self.terms, self.state_key, self.snapshot = turns, dict(point.terms), point.state_key, point.snapshot
        self.branch_points, self.entropies = parent.branch_points[:turns], parent.entropies[:turns]


def turn_messages(content: str, observation: str) -> list[dict[str, str]]:
    """A turn and its observation, if any, as chat messages."""
    answer = [{"role": "user", "content": observation}] if observation else []
    return [{"role": "assistant", "content": content}, *answer]
