"""stages.rollout: pass@k, the report, and exact resume."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tiny import make_tiny_policy
from toy_environment import CountingEnvironment, toy_tasks

from stages import rollout
from stages.evaluation.rollouts import successes, summary
from stages.params import parse_params
from stages.records.episode import Episode, TurnRecord, read_episodes, write_tasks
from stages.runtime.shards import Shard
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker
from stages.runtime.validation import ParamsError


def episode(task_id: str, attempt: int, reward: float, turns: int) -> Episode:
    records = [TurnRecord("a", "b", index > 0, 0.0, 1.0, "", "a", 0, 1) for index in range(turns)]
    return Episode(
        *(f"{task_id}/{attempt}", task_id, "toy", task_id, 0, "", "", 1.0, 1.0, 0),
        token_ids=[1] * 10,
        owner=[0] * 6 + [1] * 4,
        turns=records,
        reward=reward,
        reward_terms={"f1": reward},
        stop_reason="terminated" if reward else "turn_limit",
    )


def test_the_report_by_hand():
    episodes = [episode("a", 0, 1.0, 2), episode("a", 1, 0.0, 4), episode("b", 0, 0.0, 4), episode("b", 1, 0.0, 2)]
    report = summary(episodes, 2)
    assert report["success"] == 0.25
    assert report["pass_at_k"] == {"1": 0.25, "2": 0.5}
    assert (report["tasks_never_solved"], report["tasks_always_solved"]) == (1, 0)
    assert report["turns"]["mean"] == 3.0
    assert report["policy_tokens"]["max"] == 4.0
    assert report["accepted_actions"] == pytest.approx(8 / 12)
    assert report["stop_reasons"] == {"terminated": 1, "turn_limit": 3}
    assert report["reward_terms"] == {"f1": 0.25}
    assert successes(episodes) == {"a": [True, False], "b": [False, False]}


def test_choose_tasks_takes_what_there_is_and_does_not_follow_the_order():
    tasks = toy_tasks(9)
    chosen = rollout.choose_tasks(tasks, 4, 0)
    assert len(chosen) == 4
    assert chosen == rollout.choose_tasks(tasks[::-1], 4, 0)
    assert chosen != tasks[:4]
    assert rollout.choose_tasks(tasks, 99, 0) == tasks


class KilledError(Exception):
    """Stands for a kill."""


def make_context(root: Path) -> StageContext:
    values = {
        "seed": 5,
        "domains": ["toy"],
        "resources": {"slots": 8, "threads": 1},
        "model": {"max_length": 128},
        "rollout": {"attempts": 3, "tasks": 7, "chunk": 6, "sampling": {"max_tokens": 8}},
        "per_domain": {"toy": {}},
    }
    root.mkdir()
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    write_tasks(root / "data/curated/toy/tasks.parquet", toy_tasks(9))
    make_tiny_policy(root / "data/models/sft")
    tracker = Tracker()
    return StageContext("rollout", "toy", parse_params(values), root, tracker)


@pytest.fixture
def toy_domain(monkeypatch):
    made = SimpleNamespace(folders=[])

    def make(folder):
        made.folders.append(folder)
        return CountingEnvironment()

    monkeypatch.setattr(rollout, "open_domain", lambda name, settings: SimpleNamespace(make=make))
    return made


def outputs(root: Path) -> dict[str, bytes]:
    files = [path for folder in ("data/rollouts", "reports") for path in sorted((root / folder).rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_a_killed_stage_ends_with_the_same_bytes_as_an_undisturbed_one(tmp_path, toy_domain, monkeypatch, capsys):
    """Contract: outputs after a kill and a second start are those of an undisturbed run; finished chunks are not played again;
    checkpoints are gone at the end."""
    plain = make_context(tmp_path / "plain")
    rollout.run(plain)
    names = ["data/rollouts/toy/difficulty.json", "data/rollouts/toy/episodes.parquet", "reports/rollout/toy.json"]
    assert list(outputs(plain.root)) == names
    assert set(toy_domain.folders) == {plain.root / "data/curated/toy/worlds"}

    killed = make_context(tmp_path / "killed")
    told = []

    @contextmanager
    def dying(label, total, unit="step"):
        def advance(count=1, note=""):
            told.append(note)
            if len(told) == 15:
                raise KilledError

        yield SimpleNamespace(advance=advance)

    with monkeypatch.context() as patch:
        patch.setattr(killed, "progress", dying)
        with pytest.raises(KilledError):
            rollout.run(killed)
    assert outputs(killed.root) == {}
    restored = []

    @contextmanager
    def listening(label, total, unit="step"):
        yield SimpleNamespace(advance=lambda count=1, note="": None, restore=restored.append)

    monkeypatch.setattr(killed, "progress", listening)
    rollout.run(killed)
    assert restored == [6, 6]
    assert outputs(killed.root) == outputs(plain.root)
    assert not list((killed.root / ".bellwether").rglob("*.pt"))

    episodes = read_episodes(killed.root / names[1])
    shares = json.loads((killed.root / names[0]).read_text())
    assert len(episodes) == 21
    assert len(shares) == 7
    for task_id, share in shares.items():
        group = [episode.success for episode in episodes if episode.task_id == task_id]
        assert share == pytest.approx(sum(group) / 3)
    assert "21 episodes on 7 tasks" in capsys.readouterr().out
    report = json.loads((killed.root / names[2]).read_text())
    assert set(report["pass_at_k"]) == {"1", "2"}


def test_what_is_shown_last_is_the_mean_of_all_episodes(tmp_path, toy_domain, monkeypatch):
    """The reward of the episode that happened to end last says nothing; it stood beside pass@k as if it were the result."""
    context = make_context(tmp_path / "plain")
    told = []

    @contextmanager
    def listening(label, total, unit="step"):
        yield SimpleNamespace(advance=lambda count=1, note="": told.append(note), restore=lambda count: told.append("restored"))

    monkeypatch.setattr(context, "progress", listening)
    rollout.run(context)
    episodes = read_episodes(context.root / "data/rollouts/toy/episodes.parquet")
    assert len(told) == len(episodes) == 21
    assert told[-1] == f"mean reward {sum(episode.reward for episode in episodes) / 21:.2f}"


def test_after_its_shards_the_stage_plays_nothing_and_writes_the_same_bytes(tmp_path, toy_domain, monkeypatch):
    """Contract: shards leave their chunks and nothing else; what a shard has not done, the stage does."""
    plain, divided = make_context(tmp_path / "plain"), make_context(tmp_path / "divided")
    rollout.run(plain)
    for index in (3, 1):
        rollout.run(replace(divided, shard=Shard(index, 3)))
        assert outputs(divided.root) == {}
    assert len(list((divided.root / ".bellwether").rglob("*.pt"))) == 3  # of four chunks: 1, 4 and 3
    restored = []

    @contextmanager
    def listening(label, total, unit="step"):
        yield SimpleNamespace(advance=lambda count=1, note="": None, restore=restored.append)

    monkeypatch.setattr(divided, "progress", listening)
    rollout.run(divided)
    assert restored == [6, 6, 3]
    assert outputs(divided.root) == outputs(plain.root)


def test_shards_are_numbered_from_one():
    assert [Shard.parse("2/3").owns(number) for number in range(6)] == [False, True, False, False, True, False]
    for wrong in ("0/3", "4/3", "2", "a/b", "1/0", "-1/3"):
        with pytest.raises(ParamsError, match="write 2/4 for the second of four"):
            Shard.parse(wrong)


def test_no_training_tasks_is_an_error_that_says_where(tmp_path, toy_domain):
    context = make_context(tmp_path / "empty")
    write_tasks(context.root / "data/curated/toy/tasks.parquet", [])
    with pytest.raises(ValueError, match=r"toy/tasks\.parquet has no training tasks"):
        rollout.run(context)
