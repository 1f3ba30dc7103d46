"""What judges see of an episode, and what programs know of it: its hidden quality and its attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from stages.judging.contract import Candidate
from stages.judging.program import praises_itself

if TYPE_CHECKING:
    from stages.environments.protocol import Domain
    from stages.records.episode import Episode
    from stages.records.task import Task

WORDS = 5
"""Words that one unit of the attribute "short" stands for."""


Read = Callable[[str], str]
"""What a judge reads of a message."""


def last_message(episode: Episode) -> str:
    """What the policy wrote last, thoughts included; "" without a turn."""
    return next((message["content"] for message in reversed(episode.messages) if message["role"] == "assistant"), "")


def candidate(episode: Episode, read: Read | None = None) -> Candidate:
    """What a judge sees of an episode: the actions, the last of which is the answer if it ended the episode; no observations.
    `read`: the answer is what this finds in the last message, also of an episode that was cut off, whose message may be a thought
    without an end."""
    actions = [turn.action for turn in episode.turns]
    if read is not None and actions:
        return Candidate(read(last_message(episode)), tuple(actions[:-1]), episode.episode_id)
    if episode.terminated and actions:
        return Candidate(actions[-1], tuple(actions[:-1]), episode.episode_id)
    return Candidate("", tuple(actions), episode.episode_id)


def gold_quality(domain: Domain, task: Task, episode: Episode) -> float:
    """The domain's hidden quality of an episode; without one, its return."""
    return perceived_quality(domain, task, episode)


def named(found: Mapping[str, float], name: str, section: str) -> float:
    """The attribute that a principle names. Raises ValueError, with the known ones and remedies, for an unknown name.
    `section`: of the setting."""
    if name not in found:
        raise ValueError(
            f"{section} names {name!r}, which the program judge does not know on this domain; known: {', '.join(sorted(found))}. "
            f"Rename it, or choose a judge that reads text"
        )
    return found[name]


def read_actions(episode: Episode, read: Read | None) -> list[str]:
    """What a judge reads, as actions: under `read`, the last one is what this finds in the last message."""
    if read is None:
        return [turn.action for turn in episode.turns]
    shown = candidate(episode, read)
    return [*shown.steps, shown.answer]


def perceived_quality(domain: Domain, task: Task, episode: Episode, read: Read | None = None) -> float:
    """The domain's hidden quality of what a judge reads; without one, the return."""
    return float(domain.quality(task, read_actions(episode, read))) if hasattr(domain, "quality") else episode.reward


def attributes(domain: Domain, task: Task, episode: Episode, read: Read | None = None) -> Mapping[str, float]:
    """What a program judge perceives by principle of what it reads: `correct`, the quality; `short`, minus the answer's words in
    units of WORDS; `modest`, -1 for self-praise; and the domain's own."""
    shown = candidate(episode, read)
    text = shown.answer or " ".join(shown.steps)
    own = dict(domain.attributes(task, read_actions(episode, read))) if hasattr(domain, "attributes") else {}
    common = {
        "correct": perceived_quality(domain, task, episode, read),
        "short": -len(text.split()) / WORDS,
        "modest": -float(praises_itself(text)),
    }
    return {**common, **own}
