"""Game records: recorded games, failures included, are replayed into the same episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages.curation.__main__ import configured_domain
from stages.curation.games import PLAYER, make_games, read_games
from stages.curation.raw import read_raw, record_line
from stages.curation.selection import order_by_mix
from stages.environments.search import SearchDomain
from stages.environments.wordle import WordleDomain, WordleSettings
from stages.params import load_params
from stages.records.episode import read_episodes, write_episodes
from stages.records.task import Task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wordle() -> WordleDomain:
    return WordleDomain(WordleSettings(reward="lmrl", hidden="consistent"))


@pytest.fixture(scope="module")
def training(wordle: WordleDomain, tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    records = [record for record in wordle.recipes(52, 0) if record["split"] == "train"]
    return wordle.build(records, tmp_path_factory.mktemp("worlds"), 1)


def test_games_are_replayed_into_the_same_episodes(wordle: WordleDomain, training: list[Task], tmp_path: Path) -> None:
    """Contract: an episode has the record's actions, and the rewards, keys and outcome of the recorded game."""
    path = tmp_path / "wordle.games.jsonl"
    made = list(make_games(wordle, tmp_path, training, 60, 0))
    path.write_text("".join(record_line(record) + "\n" for record in made))
    games = read_games(path, wordle, tmp_path, training)
    assert (len(games.episodes), games.unused, dict(games.rejected)) == (60, 0, {})
    for record, episode in zip(made, games.episodes, strict=True):
        assert [turn.action for turn in episode.turns] == record["actions"]
        assert episode.policy_hash == PLAYER + record["player"]
        assert episode.reward == -float(len(record["actions"]) - episode.success)
        assert (episode.terminated, episode.truncated) == (episode.success, not episode.success)
    report = games.report()
    assert sum(player["games"] for player in report["players"].values()) == report["kept"] == 60
    assert report["players"]["novice"]["success"] < report["players"]["expert"]["success"]
    write_episodes(tmp_path / "games.parquet", games.episodes)
    assert {episode.episode_id for episode in read_episodes(tmp_path / "games.parquet")} == {
        f"{record['task_id']}/game-{record['game']:06d}" for record in made
    }


def test_games_are_valid_under_other_rewards(wordle: WordleDomain, training: list[Task], tmp_path: Path) -> None:
    """Contract: rewards and display change no move, so records stay valid and get the current rewards; records made under other
    rules are rejected."""
    path = tmp_path / "wordle.games.jsonl"
    path.write_text("".join(record_line(record) + "\n" for record in make_games(wordle, tmp_path, training, 12, 0)))
    other = WordleDomain(WordleSettings(reward="solved", show="marks", hidden="consistent"))
    games = read_games(path, other, tmp_path, training)
    assert (len(games.episodes), dict(games.rejected)) == (12, {})
    assert [episode.reward for episode in games.episodes] == [float(episode.success) for episode in games.episodes]
    assert 0 < sum(episode.success for episode in games.episodes) < 12
    fixed = WordleDomain(WordleSettings(reward="lmrl"))
    assert read_games(path, fixed, tmp_path, training).rejected == {"made with other settings": 12}


def test_rejected_games_are_counted_by_reason(wordle: WordleDomain, training: list[Task], tmp_path: Path) -> None:
    """Contract: every dropped game is counted with its reason, also those of tasks outside training."""
    good = next(make_games(wordle, tmp_path, training, 1, 0))
    lines = [
        json.dumps(good),
        "{",
        json.dumps({**good, "extra": 1}),
        json.dumps({**good, "actions": []}),
        json.dumps({**good, "settings": "0"}),
        json.dumps({**good, "actions": good["actions"][:-1] or ["x"]}),
        json.dumps({**good, "actions": [*good["actions"], "x"]}),
        json.dumps({**good, "task_id": "wordle-test-000000"}),
    ]
    path = tmp_path / "games.jsonl"
    path.write_text("\n".join(lines))
    games = read_games(path, wordle, tmp_path, training)
    assert (len(games.episodes), games.unused) == (1, 1)
    assert games.rejected == {
        "not JSON": 1,
        "malformed: a record has the keys task_id, player, game, actions, settings": 1,
        "malformed: actions must be a non-empty list of texts": 1,
        "made with other settings": 1,
        "its actions do not end with the episode": 2,
    }


def test_domain_without_players_is_rejected(domain: SearchDomain, tasks: list[Task], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="domain search has no players"):
        next(make_games(domain, tmp_path, tasks, 1, 0))
    done = subprocess.run(
        [sys.executable, "-m", "stages.curation", "games", "search", "--count", "1"], capture_output=True, cwd=ROOT, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no players" in done.stderr


def test_shipped_games_are_made_by_the_documented_command(tmp_path: Path) -> None:
    """Contract: and they have players of all strengths."""
    params = load_params(ROOT / "params.yaml")
    domain = configured_domain("wordle", params)
    lines = (ROOT / "data/raw/wordle.games.jsonl").read_text(encoding="utf-8").splitlines()
    records, _ = read_raw(ROOT / "data/raw/wordle.jsonl", "raw", domain)
    chosen = order_by_mix([record for record in records if record.split == "train"], domain)
    kept = [record.record for record in chosen[: params.section("curate", "wordle").train]]
    tasks = domain.build(kept, tmp_path, 1)
    assert [json.loads(line) for line in lines[:200]] == list(make_games(domain, tmp_path, tasks, 200, 0))
    (tmp_path / "games.jsonl").write_text("\n".join(lines[:200]))
    report = read_games(tmp_path / "games.jsonl", domain, tmp_path, tasks).report()
    assert report["kept"] == 200
    assert set(report["players"]) == {"novice", "casual", "steady", "expert"}
    assert report["players"]["novice"]["success"] < 0.6 < report["players"]["steady"]["success"]
