"""Game records: games by players of several strengths, failures included, for off-policy learning.

Each line of data/raw/<domain>.games.jsonl is a JSON object: task_id, player, game (its number), actions, and settings, a hash of
the domain settings that a game depends on. Records are replayed, so rewards and observations are those of the current settings.
`python -m stages.curation games DOMAIN --count N --seed S > data/raw/DOMAIN.games.jsonl` has a domain's players play the training
tasks that curate takes from data/raw/DOMAIN.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.curation.demonstrations import play_out
from stages.environments.protocol import Domain, DomainSettings, Environment
from stages.exchange.records import parse_object
from stages.records.episode import Episode
from stages.records.sections import params_hash
from stages.records.task import Task
from stages.runtime import spans
from stages.seeding import stream

PLAYER = "player:"
"""Prefix of the player's name in `policy_hash` of a game record's episode."""
_FIELDS: dict[str, type] = {"task_id": str, "player": str, "game": int, "actions": list, "settings": str}


@dataclass
class Games:
    """Episodes of the records that could be replayed, and the reasons for rejecting others."""

    episodes: list[Episode] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    unused: int = 0
    """Valid records of other tasks than the training tasks."""

    def report(self) -> dict[str, Any]:
        """Games and success rate per player, and rejections, for JSON."""
        players: dict[str, list[bool]] = {}
        for episode in self.episodes:
            players.setdefault(episode.policy_hash.removeprefix(PLAYER), []).append(episode.success)
        return {
            "kept": len(self.episodes),
            "players": {
                name: {"games": len(won), "success": round(sum(won) / len(won), 4)} for name, won in sorted(players.items())
            },
            "rejected": dict(sorted(self.rejected.items())),
            "unused": self.unused,
        }


def settings_hash(settings: DomainSettings) -> str:
    """16 hex digits that name a domain's settings, with defaults for those that are `replay_invariant`."""
    fields = type(settings).model_fields
    usual = {name: fields[name].get_default(call_default_factory=True) for name in settings.replay_invariant}
    return params_hash(settings.model_copy(update=usual))


def make_games(domain: Any, folder: Path, tasks: Sequence[Task], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` records, cycling through the tasks, with players drawn by weight. `folder`: the output of `Domain.build`. Raises
    ValueError for a domain without players."""
    if not hasattr(domain, "players"):
        raise ValueError(f"domain {domain.name} has no players: it lacks the methods players() and player_action()")
    weights: Mapping[str, float] = domain.players()
    environment: Environment = domain.make(folder)
    for number in range(count):
        task = tasks[number % len(tasks)]
        rng = stream("games", domain.name, seed, number)
        (player,) = rng.choices(list(weights), list(weights.values()))
        actions: list[str] = []
        done = False
        with spans.span("environment"):
            environment.reset(task)
            while not done:
                actions.append(domain.player_action(player, environment, rng))
                done = environment.step(actions[-1]).done
        spans.count("environment_steps", len(actions))
        yield {
            "task_id": task.task_id,
            "player": player,
            "game": number,
            "actions": actions,
            "settings": settings_hash(domain.settings),
        }
    environment.close()


def check_game(line: bytes, domain: Domain) -> dict[str, Any]:
    """A record from one line. Raises ValueError, with a short reason, unless it is a game with the domain's settings."""
    try:
        record = parse_object(line)
    except ValueError as error:
        raise ValueError(str(error).partition(" (")[0]) from error
    if {key: type(value) for key, value in record.items()} != _FIELDS:
        raise ValueError(f"malformed: a record has the keys {', '.join(_FIELDS)}")
    if not record["actions"] or not all(isinstance(action, str) for action in record["actions"]):
        raise ValueError("malformed: actions must be a non-empty list of texts")
    if record["settings"] != settings_hash(domain.settings):
        raise ValueError("made with other settings")
    return record


def read_games(path: Path, domain: Domain, folder: Path, tasks: Sequence[Task]) -> Games:
    """Replay the records of `path` that belong to `tasks` (training tasks). `folder`: as for `make_games`."""
    games, known = Games(), {task.task_id: task for task in tasks}
    environment = domain.make(folder)
    for line in path.read_bytes().splitlines():
        try:
            record = check_game(line, domain)
            if record["task_id"] not in known:
                games.unused += 1
                continue
            games.episodes.append(replay(environment, known[record["task_id"]], record))
        except ValueError as error:
            games.rejected[str(error)] += 1
    environment.close()
    return games


def replay(environment: Environment, task: Task, record: Mapping[str, Any]) -> Episode:
    """The episode of a record. Raises ValueError unless the episode ends with its last action."""
    left = iter(record["actions"])
    choose: Callable[[], str | None] = lambda: next(left, None)  # noqa: E731
    episode = play_out(environment, task, f"game-{record['game']:06d}", f"{PLAYER}{record['player']}", choose)
    if episode is None or next(left, None) is not None:
        raise ValueError("its actions do not end with the episode")
    episode.params_hash = record["settings"]
    return episode
