"""An episode while it is played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stages.engine.engine import Turn
from stages.environments.protocol import Environment, Most, Step
from stages.records.actions import action_key
from stages.records.episode import Episode, Owner, TurnRecord
from stages.records.task import Task
from stages.records.thinking import ParsedTurn

REMOVED = "removed_nats"
"""Reward term of episodes under a mask: the sum over tokens of -log of the probability that the mask left."""


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
    examples: tuple[Mapping[str, str], ...] = ()
    """Messages of solved tasks before the first message, without guidance. They are tokens of the prompt, and not among the
    episode's messages."""

    @property
    def prompt_key(self) -> str:
        """Equal for requests with the same messages up to the first turn."""
        shown = "".join(f"\n{message['role']}\n{message['content']}" for message in self.examples)
        return f"{self.task.task_id}\n{self.guidance}{shown}"

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


@dataclass(frozen=True)
class Paused:
    """A conversation of a play that is not the current one (stages/agent/conversations.py)."""

    episode: Episode
    turn: int
    """Turns so far."""
    turn_ids: tuple[int, ...]
    """The tokens of the last one."""


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
    forgot: bool = False
    """The newest turn hid an observation that the engine's session still has."""
    conversations: Most = "plain"
    """What of the environment's conversations can be played."""
    before: tuple[Mapping[str, str], ...] = ()
    """Messages before the first observation."""
    conversation: int = 0
    """The number of the current conversation, whose episode and turn these are."""
    earlier: int = 0
    """Turns of the play in its other conversations."""
    paused: dict[int, Paused] = field(default_factory=dict)
    """Its conversations by number, as they were when they were left; empty while there is one."""

    @property
    def first(self) -> Episode:
        """The episode of the play's first conversation."""
        return self.paused[0].episode if 0 in self.paused else self.episode

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
        kept = sum(by < turns for _, by in source.forgotten)
        branch.forgotten, branch.hidden = source.forgotten[:kept], source.hidden[:kept]
        branch.reward = sum(turn.reward for turn in branch.turns)
        messages = 1 + sum(len(turn_messages("", turn.observation)) for turn in branch.turns)
        branch.messages = [dict(message) for message in source.messages[:messages]]
        self.turn, self.terms, self.state_key, self.snapshot = turns, dict(point.terms), point.state_key, point.snapshot
        self.branch_points, self.entropies = parent.branch_points[:turns], parent.entropies[:turns]

    def write(self, turn: Turn) -> None:
        """Add the tokens of the policy's newest turn, and to the reward terms what a mask removed."""
        self.episode.append(turn.token_ids, turn.owners or Owner.POLICY, self.turn, turn.logprobs, turn.kept)
        if turn.left:
            self.terms[REMOVED] = self.terms.get(REMOVED, 0.0) - sum(turn.left)

    def record(self, turn: Turn, parsed: ParsedTurn, before: str, step: Step) -> None:
        """Add the result of the newest turn's action, whose tokens are the episode's last ones; `before`: the state key that it
        was taken in."""
        episode = self.episode
        end = len(episode.token_ids)
        if step.evidence:
            episode.own(end - len(turn.token_ids), Owner.EVIDENCE)
        episode.turns.append(
            TurnRecord(
                action=parsed.action,
                observation=step.observation.text,
                accepted=step.accepted,
                reward=step.reward,
                cost=step.cost,
                state_key=before,
                action_key=action_key(parsed.action),
                start=end - len(turn.token_ids),
                end=end,
                terms=step.terms,
            )
        )
        episode.reward += step.reward
        if self.paused:
            episode.moves.append(self.turn + self.earlier)
        for name, value in step.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value

    def stop_reason(self, turn: Turn, step: Step, max_turns: int | None) -> str:
        """Why the episode ends after the newest turn, by `Episode.stop_reason`, whatever comes next; "" if it goes on."""
        if step.done:
            return "terminated" if step.terminated else "turn_limit"
        if max_turns is not None and self.turn + self.earlier + 1 >= max_turns:
            return "turn_limit"
        return "length" if turn.stop_reason == "context" else ""

    def end(self, reason: str) -> None:
        """Record why the episode ended, and its reward terms."""
        episode, truncated = self.episode, reason != "terminated"
        episode.stop_reason, episode.truncated, episode.terminated = reason, truncated, not truncated
        episode.reward_terms = dict(sorted(self.terms.items()))


def in_thought(stop: str, turn: Turn, parsed: ParsedTurn) -> str:
    """The reason `stop` for which an episode ends, or "thinking" if it is a limit and the turn was cut within its thought."""
    cut = stop not in ("", "terminated") and not parsed.finished and turn.stop_reason != "stop"
    return "thinking" if cut else stop


def turn_messages(content: str, observation: str) -> list[dict[str, str]]:
    """A turn and its observation, if any, as chat messages."""
    answer = [{"role": "user", "content": observation}] if observation else []
    return [{"role": "assistant", "content": content}, *answer]
