"""Plays a team with some members replaced, for what each contributes (evaluate.attribution; shapley_marl, arXiv 2110.01307).

A replaced member's message is dropped (noop), was said by it in another task (random), or is what another member, drawn for each
play, says in its place with its own weights and from what it sees (random_player). Where the acting member is replaced by noop,
nothing is done, and the task is not solved. The others play with the same random keys as in the full team.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.agent.active_episode import EpisodeRequest
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.player import Player
from stages.agent.recorded_engine import RecordedEngine
from stages.agent.rollout import Labels, new_episode, turn_key
from stages.agent.team import StoredMember, StoredTeam
from stages.agent.team_play import collect_team
from stages.engine.engine import Engine, EngineSettings, Sampling, Turn
from stages.evaluation.replaced import Replaced
from stages.evaluation.team_episodes import others_tokens, team_engines
from stages.records.episode import Episode
from stages.seeding import key64

SILENT = "silent"
"""Stop reason of an episode without an acting member."""
Scripts = Mapping[tuple[str, int, str], Sequence[Turn]]
"""(task, attempt, role) -> what the member said there, turn by turn."""


class Reciter(RecordedEngine):
    """Says turns that were said elsewhere, one after the other and then from the first again, whatever it is told."""

    def __init__(self, scripts: Mapping[int, Sequence[Turn]]) -> None:
        """scripts: random key of a play's first turn -> the turns; none: the member is silent."""
        super().__init__({})
        self._scripts = scripts
        self._said: dict[int, tuple[Sequence[Turn], int]] = {}

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        self._check(session)
        turns, count = self._said.get(session) or (self._scripts[key], 0)
        self._said[session] = (turns, count + 1)
        said = turns[count % len(turns)] if turns else Turn(session, (), (), "context")
        self._asked.append(replace(said, session=session))


def play_coalition(
    replaced: Replaced,
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
    """As `play_team`, with the members of `replaced` replaced."""
    acting = team.members[-1].role
    if replaced.by == "noop" and acting in replaced.roles:
        return sorted((_silent(request, acting, sampling, labels) for request in requests), key=lambda one: one.episode_id), {}

    def played(
        engines: Mapping[str, Engine], requests: Sequence[EpisodeRequest], members: Sequence[StoredMember]
    ) -> list[Episode]:
        return collect_team(engines, player.chat, pool, requests, members, sampling, labels, **limits)

    episodes: list[Episode] = []
    with team_engines(folder, team, player, engine, settings) as engines:
        if replaced.by == "noop":
            episodes = played(engines, requests, [member for member in team.members if member.role not in replaced.roles])
        elif replaced.by == "random":
            elsewhere = _elsewhere(replaced, requests)
            donors = list({request.episode_id: request for request in elsewhere}.values())
            scripts = scripts_of(played(engines, donors, team.members), player.chat)
            for role in replaced.roles:
                engines[role] = Reciter(_by_key(role, role == acting, requests, elsewhere, scripts, labels))
            episodes = played(engines, requests, team.members)
        else:
            for voices, own in drawn_voices(team, replaced.roles, requests, labels).items():
                members, voiced = voiced_by(team, dict(zip(replaced.roles, voices, strict=True)), engines)
                episodes += played(voiced, own, members)
    acted = [one for one in episodes if one.role == acting]
    return sorted(acted, key=lambda one: one.episode_id), dict(others_tokens(episodes, team))


def _silent(request: EpisodeRequest, role: str, sampling: Sampling, labels: Labels) -> Episode:
    """An episode in which nobody acts."""
    episode = new_episode(request, sampling, labels, role)
    episode.truncated, episode.stop_reason = True, SILENT
    return episode


# ---- random: messages from another task -------------------------------------------------------------------------------------


def _elsewhere(replaced: Replaced, requests: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
    """For each request the one of its donor, with the same number of the attempt."""
    tasks = list(dict.fromkeys(request.task.task_id for request in requests))
    donors = dict(zip(tasks, replaced.donors, strict=True))
    found = [(donors[request.task.task_id], request.attempt) for request in requests]
    return [EpisodeRequest(task, attempt, task.task_id) for task, attempt in found]


def scripts_of(episodes: Sequence[Episode], chat: Chat) -> dict[tuple[str, int, str], list[Turn]]:
    """What every member said in the plays of a team."""
    found = {}
    for episode in episodes:
        turns = []
        for turn in episode.turns:
            tokens = tuple(episode.token_ids[turn.start : turn.end])
            stop = "stop" if tokens and tokens[-1] == chat.end_of_turn else "length"
            turns.append(Turn(0, tokens, tuple(episode.logprob[turn.start : turn.end]), stop))
        attempt = int((episode.play or episode.episode_id).rpartition("/")[2])
        found[episode.task_id, attempt, episode.role] = turns
    return found


def _by_key(
    role: str,
    acts: bool,
    requests: Sequence[EpisodeRequest],
    elsewhere: Sequence[EpisodeRequest],
    scripts: Scripts,
    labels: Labels,
) -> dict[int, Sequence[Turn]]:
    """The scripts of a member by the random keys that its first turns have in the requests' plays."""
    own = labels if acts else replace(labels, stream=f"{labels.stream}/{role}")
    pairs = zip(requests, elsewhere, strict=True)
    return {
        turn_key(own, request.task.task_id, request.attempt, 0): scripts.get((donor.task.task_id, donor.attempt, role), ())
        for request, donor in pairs
    }


# ---- random_player: another member's message --------------------------------------------------------------------------------


def drawn_voices(
    team: StoredTeam, roles: Sequence[str], requests: Sequence[EpisodeRequest], labels: Labels
) -> dict[tuple[str, ...], list[EpisodeRequest]]:
    """Who speaks in place of each of the roles, drawn among all other members for each play -> the plays."""
    found: dict[tuple[str, ...], list[EpisodeRequest]] = {}
    for request in requests:
        drawn = []
        for role in roles:
            others = [member.role for member in team.members if member.role != role]
            key = key64(labels.seed, labels.stream, "attribution", request.task.task_id, request.attempt, role)
            drawn.append(others[key % len(others)])
        found.setdefault(tuple(drawn), []).append(request)
    return found


def voiced_by(
    team: StoredTeam, voices: Mapping[str, str], engines: Mapping[str, Engine]
) -> tuple[list[StoredMember], dict[str, Engine]]:
    """The members and their engines where the roles in `voices` speak with the weights and the view of other members, when it is
    their own turn."""
    known = {member.role: member for member in team.members}
    members, own = [], dict(engines)
    for member in team.members:
        other = known[voices.get(member.role, member.role)]
        own[member.role] = engines[other.role]
        sees = [role for role in other.sees if role != member.role]
        members.append(StoredMember(role=member.role, sees=sees, speaks=member.speaks, template=other.template))
    return members, own
