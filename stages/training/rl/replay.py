"""Episodes to learn from again: recorded ones, which stay, and played ones, of which the oldest make room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from stages.agent.chat import Chat
from stages.algorithms.batch import TrajectoryBatch
from stages.records.episode import Episode, read_episodes
from stages.seeding import stream
from stages.training.batches import padded, trajectory_batch, turn_boundaries, turn_ends
from stages.training.rl.demonstrations import as_external, is_part
from stages.values.turn_critic import Turns

FILES = {
    "rollouts": "rollouts/{domain}/episodes.parquet",
    "demonstrations": "curated/{domain}/demonstrations.parquet",
    "games": "curated/{domain}/games.parquet",
}
"""Where recorded episodes are, below data/; not every domain has game records."""
REMEDIES = {
    "rollouts": "raise rollout.tasks",
    "demonstrations": "raise curate.expert_demonstrations",
    "games": "{domain} has no game records: leave 'games' out",
}
"""What to do about a kind of which there are no episodes."""


class Replay:
    """`capacity`: turns of played episodes that are kept, the newest episode's in any case. Episodes without a turn are not."""

    def __init__(self, recorded: Sequence[Episode], capacity: int) -> None:
        self.recorded = [episode for episode in recorded if episode.turns]
        self.played: list[Episode] = []
        self.capacity = capacity

    @property
    def turns(self) -> int:
        return sum(len(episode.turns) for episode in (*self.recorded, *self.played))

    def add(self, episodes: Sequence[Episode]) -> None:
        """Keep played episodes, oldest first."""
        self.played += [episode for episode in episodes if episode.turns]
        held = 0
        for place in range(len(self.played) - 1, -1, -1):
            held += len(self.played[place].turns)
            if held > self.capacity and place + 1 < len(self.played):
                del self.played[: place + 1]
                break

    def draw(self, count: int, *key: object) -> list[Episode]:
        """`count` episodes, uniformly with replacement; the draw depends on `key` and what there is. Raises ValueError if there
        is nothing to draw."""
        episodes = [*self.recorded, *self.played]
        if not episodes:
            raise ValueError("the replay holds no episode with a turn: the policy has taken none yet; raise model.max_length")
        return stream("replay", *key).choices(episodes, k=count)

    def state_dict(self) -> dict[str, Any]:
        return {"played": self.played}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.played = list(state["played"])


def recorded_episodes(data: Path, domain: str, kind: str, tasks: Collection[str]) -> list[Episode]:
    """Recorded episodes of `tasks` of a kind of FILES below `data`, as they are stored; none of a kind that the domain does not
    have. Imported parts of episodes are left out: their return is not known."""
    path = data / FILES[kind].format(domain=domain)
    if not path.exists():
        return []
    return [episode for episode in read_episodes(path) if episode.task_id in tasks and not is_part(episode)]


def read_records(
    data: Path, domain: str, kinds: Sequence[str], tasks: Collection[str], chat: Chat, max_length: int
) -> dict[str, list[Episode]]:
    """`recorded_episodes` with their tokens, by kind, sorted by id.

    Raises ValueError where there is none at all, and for one of more than `max_length` tokens.
    """
    found: dict[str, list[Episode]] = {}
    for kind in kinds:
        episodes = recorded_episodes(data, domain, kind, tasks)
        episodes = [episode if episode.token_ids else as_external(episode, chat) for episode in episodes]
        for episode in episodes:
            if len(episode.token_ids) > max_length:
                raise ValueError(
                    f"{data / FILES[kind].format(domain=domain)}: episode {episode.episode_id} has "
                    f"{len(episode.token_ids)} tokens, over model.max_length ({max_length}); raise that, or leave '{kind}' "
                    f"out of rl.replay.records"
                )
        found[kind] = sorted(episodes, key=lambda episode: episode.episode_id)
    if kinds and not any(found.values()):
        remedies = ", or ".join(REMEDIES[kind].format(domain=domain) for kind in kinds)
        others = "" if len(kinds) == len(FILES) else f"; or name {' or '.join(kind for kind in FILES if kind not in kinds)}"
        raise ValueError(
            f"rl.replay.records names {', '.join(kinds)}, and there are none of the training tasks of {domain}; "
            f"{remedies}{others}"
        )
    return found


def as_turns(
    episodes: Sequence[Episode], shape: Callable[[TrajectoryBatch], TrajectoryBatch], chat: Chat | None, max_length: int
) -> Turns:
    """Episodes as the critic reads them, with the rewards that `shape` makes of the environment's.

    chat: where it is given, values go on after an episode that a limit cut: behind the last answer, as the policy would have read
    it, where that has room in `max_length` tokens.
    """
    batch = shape(trajectory_batch(episodes))
    after = turn_ends(batch)
    before = torch.cat([turn_boundaries(batch), torch.full((len(episodes), 1), -1)], 1)
    rows = [list(episode.token_ids) for episode in episodes]
    for row, episode in enumerate(episodes):
        last = episode.turns[-1]
        if chat is None or not episode.truncated:
            continue
        said = episode.token_ids[last.start : last.end]
        rows[row] = [*rows[row][: last.end], *chat.closing_tokens(said), *chat.observation_tokens(last.observation)]
        if len(rows[row]) <= max_length:
            before[row, len(episode.turns)] = len(rows[row]) - 1
    return Turns(padded(rows, 0, torch.int64), before, after, batch.turn_rewards)
