"""The offline dataset: episodes that exist before rl starts (rollouts of the SFT policy, demonstrations, game records)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.agent.chat import Chat
from stages.algorithms.parts.replay import Replay
from stages.records.episode import Episode, read_episodes
from stages.training.rl.demonstrations import as_external, is_fragment

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext

FILES = {
    "rollouts": "rollouts/{domain}/episodes.parquet",
    "demonstrations": "curated/{domain}/demonstrations.parquet",
    "games": "curated/{domain}/games.parquet",
}
"""The file of each source, below data/; not every domain has game records."""
REMEDIES = {
    "rollouts": "raise rollout.tasks",
    "demonstrations": "raise curate.expert_demonstrations",
    "games": "{domain} has no game records: leave 'games' out",
}
"""What to do about a source without episodes."""


def read_source(data: Path, domain: str, source: str, tasks: Collection[str]) -> list[Episode]:
    """The episodes of `tasks` from a source of FILES below `data`, as stored; none if the domain lacks the source. Imported
    fragments of episodes are skipped: their return is unknown."""
    path = data / FILES[source].format(domain=domain)
    if not path.exists():
        return []
    return [episode for episode in read_episodes(path) if episode.task_id in tasks and not is_fragment(episode)]


def read_offline_dataset(
    data: Path, domain: str, sources: Sequence[str], tasks: Collection[str], chat: Chat, max_length: int
) -> dict[str, list[Episode]]:
    """The tokenized episodes of each source, sorted by id.

    Raises ValueError if there are none at all, and for an episode of more than `max_length` tokens.
    """
    found: dict[str, list[Episode]] = {}
    for source in sources:
        episodes = read_source(data, domain, source, tasks)
        episodes = [episode if episode.token_ids else as_external(episode, chat) for episode in episodes]
        for episode in episodes:
            if len(episode.token_ids) > max_length:
                raise ValueError(
                    f"{data / FILES[source].format(domain=domain)}: episode {episode.episode_id} has "
                    f"{len(episode.token_ids)} tokens, over model.max_length ({max_length}); raise model.max_length, or remove "
                    f"'{source}' from rl.replay.records"
                )
        found[source] = sorted(episodes, key=lambda episode: episode.episode_id)
    if sources and not any(found.values()):
        remedies = ", or ".join(REMEDIES[source].format(domain=domain) for source in sources)
        others = [source for source in FILES if source not in sources]
        add = f"; or add {' or '.join(others)}" if others else ""
        raise ValueError(
            f"rl.replay.records: no episodes of the training tasks of {domain} in {', '.join(sources)}; {remedies}{add}"
        )
    return found


def stored_episodes(context: StageContext, replay: Replay, tasks: Collection[str], chat: Chat, max_length: int) -> list[Episode]:
    """The episodes of all sources that `rl.replay.records` names; see `read_offline_dataset`."""
    dataset = read_offline_dataset(context.data, str(context.domain), replay.records, tasks, chat, max_length)
    return [episode for episodes in dataset.values() for episode in episodes]
