"""Episodes that are there without playing: demonstrations, actions that are known, games of others, the SFT policy's rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.agent.chat import Chat
from stages.environments.protocol import Environment
from stages.records.episode import EXPERT, IMPORTED, Episode, Owner, TurnRecord
from stages.records.task import Task, opening
from stages.training.rl.demonstrations import as_external
from stages.training.rl.replay import recorded_episodes

KINDS = ("real", "other", "own")
"""Ground truth; what others did; the SFT policy's own."""
TRUE = (EXPERT, IMPORTED, "known")
"""Whose successes are ground truth, beside those of players (imported ones were played in the environment)."""
_CHOSEN = (int(Owner.POLICY), int(Owner.EXTERNAL))


@dataclass(frozen=True)
class StoredEpisode:
    """T tokens, of which those where `mask` were chosen; `rewards` of turns on their last token."""

    task_id: str
    kind: str
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    rewards: tuple[float, ...]

    @classmethod
    def of(cls, episode: Episode, kind: str) -> StoredEpisode:
        """What is left of an episode with tokens: all up to the last one that was chosen."""
        mask = [owner in _CHOSEN for owner in episode.owner]
        rewards = [0.0] * len(mask)
        for turn in episode.turns:
            if turn.end > turn.start:
                rewards[turn.end - 1] += turn.reward
        length = max((place + 1 for place, chosen in enumerate(mask) if chosen), default=0)
        return cls(episode.task_id, kind, tuple(episode.token_ids[:length]), tuple(mask[:length]), tuple(rewards[:length]))


def known_episodes(domain: Any, worlds: Path, tasks: Sequence[Task]) -> Iterator[Episode]:
    """Episodes, without tokens, of the actions whose returns the domain knows; none where it knows of none."""
    if not hasattr(domain, "known_actions"):
        return
    environment: Environment = domain.make(worlds)
    for task in tasks:
        prompt = opening(task.prompt, environment.reset(task).text)
        for number, (action, reward) in enumerate(domain.known_actions(task)):
            turn = TurnRecord(action, "", True, reward, 0.0, "", " ".join(action.lower().split()), 0, 0)
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": action}]
            yield Episode(
                *(f"{task.task_id}/known-{number:03d}", task.task_id, task.domain, task.task_id, 0, "known", "", 0.0, 1.0, 0),
                turns=[turn],
                reward=reward,
                terminated=True,
                messages=messages,
            )
    environment.close()


def stored_episodes(
    data: Path, name: str, domain: Any, tasks: Mapping[str, Task], chat: Chat, max_length: int
) -> dict[str, list[StoredEpisode]]:
    """Kind -> all that is stored of the tasks of domain `name` below `data`, in a fixed order; among ground truth and what others
    did, each only once. Longer ones than `max_length` are left out, and so are imported parts of episodes, which have no return.

    Raises ValueError if there is nothing.
    """
    shown = recorded_episodes(data, name, "demonstrations", tasks)
    shown += known_episodes(domain, data / "curated" / name / "worlds", [tasks[task_id] for task_id in sorted(tasks)])
    shown += recorded_episodes(data, name, "games", tasks)
    found: dict[str, list[StoredEpisode]] = {kind: [] for kind in KINDS}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for episode in shown:
        truth = episode.success and (episode.policy_hash in TRUE or episode.policy_hash.startswith("player:"))
        stored = StoredEpisode.of(as_external(episode, chat), "real" if truth else "other")
        if (stored.task_id, stored.token_ids) not in seen:
            seen.add((stored.task_id, stored.token_ids))
            found[stored.kind].append(stored)
    found["own"] = [StoredEpisode.of(episode, "own") for episode in recorded_episodes(data, name, "rollouts", tasks)]
    kept = {kind: [one for one in all_ if 0 < len(one.token_ids) <= max_length] for kind, all_ in found.items()}
    if not any(kept.values()):
        raise ValueError(
            f"there are no stored episodes of the training tasks of {name} to learn from; raise curate.expert_demonstrations or "
            f"rollout.tasks"
        )
    return kept


def shares(sizes: Mapping[str, int], per_step: int, real_share: float, other_share: float) -> dict[str, int]:
    """How many episodes of each kind a step takes, `per_step` in all: the shares of `real` and `other`, the rest of `own`. A kind
    of which there is none leaves its places to the others in proportion (in equal parts, if these have no share); what rounding
    leaves goes to the largest remainders."""
    asked = {"real": real_share, "other": other_share, "own": 1.0 - real_share - other_share}
    wanted = {kind: share if sizes[kind] else 0.0 for kind, share in asked.items()}
    if sum(wanted.values()) <= 0:
        wanted = {kind: float(sizes[kind] > 0) for kind in asked}
    exact = {kind: per_step * share / sum(wanted.values()) for kind, share in wanted.items()}
    counts = {kind: math.floor(number) for kind, number in exact.items()}
    ordered = sorted(exact, key=lambda kind: counts[kind] - exact[kind])
    for kind in ordered[: per_step - sum(counts.values())]:
        counts[kind] += 1
    return counts


def returns_by_task(episodes: Sequence[StoredEpisode]) -> dict[str, float]:
    """Task -> mean return of its episodes."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        found.setdefault(episode.task_id, []).append(sum(episode.rewards))
    return {task_id: sum(values) / len(values) for task_id, values in found.items()}
