"""One episode under way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from stages.environments.protocol import Environment
from stages.records.episode import Episode
from stages.records.task import Task


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to play. Episodes with the same `group_id` are attempts at the same task."""

    task: Task
    attempt: int
    group_id: str

    @property
    def episode_id(self) -> str:
        return f"{self.task.task_id}/{self.attempt:04d}"


@dataclass
class BranchPoint:
    """Where an episode stood after one of its turns, the answer included: what a branch starts from."""

    snapshot: Any
    """The environment's; None where the episode ended."""
    state_key: str
    terms: dict[str, float]
    tokens: int


@dataclass
class ActiveEpisode:
    """An episode under way."""

    request: EpisodeRequest
    episode: Episode
    environment: Environment
    state_key: str = ""
    session: int = -1
    turn: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    row: int = 0
    """Its number in a group that goes in rounds."""
    marks: list[BranchPoint] = field(default_factory=list)
    """After each of its turns, where it may be branched from."""
    entropies: list[tuple[float, ...]] = field(default_factory=list)
    """Of each turn's tokens, where the plan wants them."""
    snapshot: Any = None
    """Of a branch that has not started: where its environment is to go on from."""
    held: list[int] = field(default_factory=list)
    """Tokens of the newest answer, while it waits for others of its group; the engine gets them with the next request."""

    @property
    def over(self) -> bool:
        return self.episode.terminated or self.episode.truncated

    def take_over(self, parent: ActiveEpisode, turns: int) -> None:
        """Become a branch of `parent`: stand where it stood after its first `turns` turns. The environment is not touched."""
        source, branch, mark = parent.episode, self.episode, parent.marks[turns - 1]
        branch.parent, branch.inherited = source.episode_id, turns
        for name in ("token_ids", "owner", "logprob", "turn"):
            setattr(branch, name, getattr(source, name)[: mark.tokens])
        branch.turns = [replace(turn) for turn in source.turns[:turns]]
        branch.reward = sum(turn.reward for turn in branch.turns)
        said = 1 + sum(len(turn_messages("", turn.observation)) for turn in branch.turns)
        branch.messages = [dict(message) for message in source.messages[:said]]
        self.turn, self.terms, self.state_key, self.snapshot = turns, dict(mark.terms), mark.state_key, mark.snapshot
        self.marks, self.entropies = parent.marks[:turns], parent.entropies[:turns]


def turn_messages(said: str, observation: str) -> list[dict[str, str]]:
    """A turn as messages."""
    answer = [{"role": "user", "content": observation}] if observation else []
    return [{"role": "assistant", "content": said}, *answer]
