"""Plays panels with a team (stages/agent/team.py): the acting member as the model is played, beside the others, who speak."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stages.agent.active_episode import EpisodeRequest
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.player import Player, open_player
from stages.agent.policy import check_folder, policy_hash
from stages.agent.rollout import Labels
from stages.agent.team import FILE, StoredTeam, member_folder, read_team
from stages.agent.team_play import collect_team
from stages.engine.engine import Engine, EngineSettings, Sampling
from stages.records.episode import Episode


def team_hash(digest: str, folder: Path, domains: Sequence[str]) -> str:
    """16 hex digits that name a model, `digest`, together with the team that it plays in in one of the domains; `digest` if it
    plays alone in all. Raises PolicyError for an incomplete folder of a member."""
    for domain in domains:
        if (team := read_team(folder, domain)) is not None:
            others = [member_folder(folder, team, member.role) for member in team.members[:-1]]
            for other in others:
                check_folder(other)
            names = [digest, hashlib.sha256((folder / FILE).read_bytes()).hexdigest(), *(policy_hash(other) for other in others)]
            return hashlib.sha256("+".join(names).encode()).hexdigest()[:16]
    return digest


def play_team(
    folder: Path,
    team: StoredTeam,
    player: Player,
    engine: Engine,
    pool: EnvironmentPool,
    requests: Sequence[EpisodeRequest],
    sampling: Sampling,
    labels: Labels,
    settings: EngineSettings,
    **limits: Any,
) -> tuple[list[Episode], dict[str, int]]:
    """The acting member's episodes, sorted by id, and for each the number of tokens that the others wrote in its play.

    player, engine: of the acting member, whose weights are in `folder`; limits: `max_length`, `max_turns` and `width` of
    `collect_team`. Members without weights of their own share the player's.
    """
    with team_engines(folder, team, player, engine, settings) as engines:
        episodes = collect_team(engines, player.chat, pool, requests, team.members, sampling, labels, **limits)
    return [one for one in episodes if one.role == team.members[-1].role], dict(others_tokens(episodes, team))


@contextmanager
def team_engines(
    folder: Path, team: StoredTeam, player: Player, engine: Engine, settings: EngineSettings
) -> Iterator[dict[str, Engine]]:
    """The engine of each role; see `play_team`."""
    engines: dict[str, Engine] = {}
    with ExitStack() as opened:
        for member in team.members[:-1]:
            engines[member.role] = player.engine
            if (place := member_folder(folder, team, member.role)) != folder:
                own = open_player(place, settings, text=True)
                opened.callback(own.close)
                engines[member.role] = own.engine
        engines[team.members[-1].role] = engine
        yield engines


def others_tokens(episodes: Sequence[Episode], team: StoredTeam) -> Mapping[str, int]:
    """Play -> tokens of the members that do not act."""
    found: dict[str, int] = {}
    for episode in episodes:
        if episode.role != team.members[-1].role:
            found[episode.play] = found.get(episode.play, 0) + episode.policy_tokens
    return found
