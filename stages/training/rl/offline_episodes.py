"""Offline episodes as tokens, by origin, for methods that learn from them token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.agent.chat import Chat
from stages.environments.protocol import Environment
from stages.records.episode import EXPERT, IMPORTED, TRAINED, Episode, TurnRecord
from stages.records.task import Task, opening
from stages.training.rl.demonstrations import as_external
from stages.training.rl.offline_dataset import read_source

KINDS = ("real", "other", "own")
"""Ground truth; what others did; the SFT policy's own rollouts."""
TRUSTED = (EXPERT, IMPORTED, "known")
"""Authors whose successes are ground truth, beside those of players (imported ones were replayed in the environment)."""


@dataclass(frozen=True)
class OfflineEpisode:
    """T tokens; `mask` marks the actions' tokens, and each turn's reward is on its last token."""

    task_id: str
    kind: str
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    rewards: tuple[float, ...]

    @classmethod
    def of(cls, episode: Episode, kind: str) -> OfflineEpisode:
        """A tokenized episode, cut after the last token of its last action."""
        mask = [owner in TRAINED for owner in episode.owner]
        rewards = [0.0] * len(mask)
        for turn in episode.turns:
            if turn.end > turn.start:
                rewards[turn.end - 1] += turn.reward
        length = max((place + 1 for place, trained in enumerate(mask) if trained), default=0)
        return cls(episode.task_id, kind, tuple(episode.token_ids[:length]), tuple(mask[:length]), tuple(rewards[:length]))


def known_episodes(domain: Any, worlds: Path, tasks: Sequence[Task]) -> Iterator[Episode]:
    """Episodes, without tokens, of the actions whose returns the domain knows (`known_actions`); none if it has no such
    method."""
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


def offline_episodes(
    data: Path, name: str, domain: Any, tasks: Mapping[str, Task], chat: Chat, max_length: int
) -> dict[str, list[OfflineEpisode]]:
    """Kind -> offline episodes of the tasks of domain `name` below `data`, in a fixed order, without duplicates in `real` and
    `other`. Episodes longer than `max_length` and imported fragments, which have no return, are skipped.

    Raises ValueError if there are none.
    """
    written = read_source(data, name, "demonstrations", tasks)
    written += known_episodes(domain, data / "curated" / name / "worlds", [tasks[task_id] for task_id in sorted(tasks)])
    written += read_source(data, name, "games", tasks)
    found: dict[str, list[OfflineEpisode]] = {kind: [] for kind in KINDS}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for episode in written:
        real = episode.success and (episode.policy_hash in TRUSTED or episode.policy_hash.startswith("player:"))
        offline = OfflineEpisode.of(as_external(episode, chat), "real" if real else "other")
        if (offline.task_id, offline.token_ids) not in seen:
            seen.add((offline.task_id, offline.token_ids))
            found[offline.kind].append(offline)
    found["own"] = [OfflineEpisode.of(episode, "own") for episode in read_source(data, name, "rollouts", tasks)]
    found = {kind: [one for one in episodes if 0 < len(one.token_ids) <= max_length] for kind, episodes in found.items()}
    if not any(found.values()):
        raise ValueError(
            f"the offline dataset has no episodes of the training tasks of {name}; raise curate.expert_demonstrations or "
            f"rollout.tasks"
        )
    return found


def kind_counts(sizes: Mapping[str, int], per_step: int, real_share: float, other_share: float) -> dict[str, int]:
    """How many episodes of each kind a step uses, `per_step` in all: the shares of `real` and `other`, the rest of `own`.

    The share of an empty kind goes to the others in proportion (equally, if these have no share); rounding remainders go to the
    largest fractions.
    """
    requested = {"real": real_share, "other": other_share, "own": 1.0 - real_share - other_share}
    shares = {kind: share if sizes[kind] else 0.0 for kind, share in requested.items()}
    if sum(shares.values()) <= 0:
        shares = {kind: float(sizes[kind] > 0) for kind in requested}
    exact = {kind: per_step * share / sum(shares.values()) for kind, share in shares.items()}
    counts = {kind: math.floor(number) for kind, number in exact.items()}
    by_remainder = sorted(exact, key=lambda kind: counts[kind] - exact[kind])
    for kind in by_remainder[: per_step - sum(counts.values())]:
        counts[kind] += 1
    return counts


def mean_returns(episodes: Sequence[OfflineEpisode]) -> dict[str, float]:
    """Task -> mean return of its episodes."""
    found: dict[str, list[float]] = {}
    for episode in episodes:
        found.setdefault(episode.task_id, []).append(sum(episode.rewards))
    return {task_id: sum(values) / len(values) for task_id, values in found.items()}
