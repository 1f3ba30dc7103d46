"""The rollout stage: pass@k, the report, exact resume and shards."""

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
from stages.evaluation.attempts import successes, summary
from stages.params import parse_params
from stages.records.episode import Episode, TurnRecord, read_episodes, write_tasks
from stages.runtime.checkpoints import Checkpoints
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


def test_summary_of_four_episodes():
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


def test_choose_tasks_ignores_order_and_caps_at_available():
    tasks = toy_tasks(9)
    chosen = rollout.choose_tasks(tasks, 4, 0)
    assert len(chosen) == 4
    assert chosen == rollout.choose_tasks(tasks[::-1], 4, 0)
    assert chosen != tasks[:4]
    assert rollout.choose_tasks(tasks, 99, 0) == tasks


class KilledError(Exception):
    """Simulates a kill."""


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


def test_resume_after_kill_writes_same_bytes(tmp_path, toy_domain, monkeypatch, capsys):
    """Contract: a resumed stage writes the bytes of an uninterrupted one, does not replay finished chunks and deletes its
    checkpoints."""
    plain = make_context(tmp_path / "plain")
    rollout.run(plain)
    files = ["data/rollouts/toy/difficulty.json", "data/rollouts/toy/episodes.parquet", "reports/rollout/toy.json"]
    assert list(outputs(plain.root)) == files
    assert set(toy_domain.folders) == {plain.root / "data/curated/toy/worlds"}

    killed = make_context(tmp_path / "killed")
    notes = []

    @contextmanager
    def dying(label, total, unit="step"):
        def advance(count=1, note=""):
            notes.append(note)
            if len(notes) == 15:
                raise KilledError

        yield SimpleNamespace(advance=advance)

    with monkeypatch.context() as patch:
        patch.setattr(killed, "progress", dying)
        with pytest.raises(KilledError):
            rollout.run(killed)
    assert outputs(killed.root) == {}
    restored = []

    @contextmanager
    def recording(label, total, unit="step"):
        yield SimpleNamespace(advance=lambda count=1, note="": None, restore=restored.append)

    monkeypatch.setattr(killed, "progress", recording)
    rollout.run(killed)
    assert restored == [6, 6]
    assert outputs(killed.root) == outputs(plain.root)
    assert not list((killed.root / ".bellwether").rglob("*.pt"))

    episodes = read_episodes(killed.root / files[1])
    shares = json.loads((killed.root / files[0]).read_text())
    assert len(episodes) == 21
    assert len(shares) == 7
    for task_id, share in shares.items():
        group = [episode.success for episode in episodes if episode.task_id == task_id]
        assert share == pytest.approx(sum(group) / 3)
    assert "21 episodes on 7 tasks" in capsys.readouterr().out
    report = json.loads((killed.root / files[2]).read_text())
    assert set(report["pass_at_k"]) == {"1", "2"}


def test_progress_ends_with_mean_reward_of_all_episodes(tmp_path, toy_domain, monkeypatch):
    """Not the reward of the last episode, which would read as the result."""
    context = make_context(tmp_path / "plain")
    notes = []

    @contextmanager
    def recording(label, total, unit="step"):
        yield SimpleNamespace(advance=lambda count=1, note="": notes.append(note), restore=lambda count: notes.append("restored"))

    monkeypatch.setattr(context, "progress", recording)
    rollout.run(context)
    episodes = read_episodes(context.root / "data/rollouts/toy/episodes.parquet")
    assert len(notes) == len(episodes) == 21
    assert notes[-1] == f"mean reward {sum(episode.reward for episode in episodes) / 21:.2f}"


def test_a_run_that_only_collects_logs_no_work_of_its_engine(tmp_path, toy_domain):
    """Contract: engine/... are counts of the stage's work, not the zeros of an engine beside forks that played."""
    logged: dict[str, float] = {}

    class Recording(Tracker):
        def metric(self, name, value, step=None):
            logged[name] = value

    context = replace(make_context(tmp_path / "run"), tracker=Recording())
    rollout.run(replace(context, shard=Shard(1, 1)))
    assert logged["engine/sampled_tokens"] > 0
    logged.clear()
    rollout.run(replace(context, collects=True))
    assert "success" in logged
    assert not [name for name in logged if name.startswith("engine/")]


def test_stage_after_shards_writes_same_bytes(tmp_path, toy_domain, monkeypatch):
    """Contract: a shard writes only its chunks; the stage plays the chunks that no shard has finished."""
    plain, divided = make_context(tmp_path / "plain"), make_context(tmp_path / "divided")
    rollout.run(plain)
    for index in (3, 1):
        rollout.run(replace(divided, shard=Shard(index, 3)))
        assert outputs(divided.root) == {}
    assert len(list((divided.root / ".bellwether").rglob("*.pt"))) == 3  # chunks 1, 3 and 4 of four
    restored = []

    @contextmanager
    def recording(label, total, unit="step"):
        yield SimpleNamespace(advance=lambda count=1, note="": None, restore=restored.append)

    monkeypatch.setattr(divided, "progress", recording)
    rollout.run(divided)
    assert restored == [6, 6, 3]
    assert outputs(divided.root) == outputs(plain.root)


def test_shard_numbers_start_at_one():
    assert [Shard.parse("2/3").owns(number) for number in range(6)] == [False, True, False, False, True, False]
    for wrong in ("0/3", "4/3", "2", "a/b", "1/0", "-1/3"):
        with pytest.raises(ParamsError, match="write 2/4 for the second of four"):
            Shard.parse(wrong)


def test_missing_training_tasks_error_names_file(tmp_path, toy_domain):
    context = make_context(tmp_path / "empty")
    write_tasks(context.root / "data/curated/toy/tasks.parquet", [])
    with pytest.raises(ValueError, match=r"toy/tasks\.parquet has no training tasks"):
        rollout.run(context)


def test_without_tasks_nothing_is_played(tmp_path: Path) -> None:
    """Contract: rollout.tasks 0 leaves no attempt, no measured task and no checkpoint of an interrupted run, and needs no
    policy."""
    context = make_context(tmp_path / "run")
    out = context.data / "rollouts/toy"
    (context.data / "models/sft/model.safetensors").unlink()
    values = yaml.safe_load((context.root / "params.yaml").read_text())
    off = replace(context, params=parse_params({**values, "rollout": {"tasks": 0}}))
    left = Checkpoints(context)
    left.save("episodes-00000", [])
    rollout.run(replace(off, shard=Shard(1, 2)))
    assert not out.exists()
    rollout.run(off)
    assert not left.parent.exists()
    assert read_episodes(out / "episodes.parquet") == []
    assert json.loads((out / "difficulty.json").read_text()) == {}
    assert json.loads((context.reports / "rollout/toy.json").read_text()) == {"domain": "toy", "tasks": 0, "episodes": 0}


READERS = {
    "rl.algorithm: rejection_sft": {"rl": {"algorithm": "rejection_sft"}},
    "rl.preference.source: guided": {"rl": {"algorithm": "dpo", "preference": {"source": "guided"}}},
    "rl.selection.kind: model_aware": {"rl": {"selection": {"kind": "model_aware"}}},
    "rl.replay.records": {"rl": {"algorithm": "archer", "replay": {"records": ["demonstrations", "rollouts"]}}},
    "rl.algorithm: archer_offline": {"rl": {"algorithm": "archer_offline"}},
    "rl.algorithm: b_coder": {"rl": {"algorithm": "b_coder"}, "annotate": {"returns": [-1.0, 1.0]}},
    "annotate.progress.kind: spa": {"annotate": {"progress": {"kind": "spa"}}},
    "annotate.judge_model.labels: policy": {"annotate": {"judge_model": {"kind": "comparison", "labels": "policy"}}},
    "annotate.evaluation.kind: mixed": {"annotate": {"tasks": 48, "evaluation": {"kind": "mixed"}}},
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_of_rollouts_are_refused_without_them(reader: str) -> None:
    values = {"domains": ["search"], "per_domain": {"search": {}}, **READERS[reader]}
    parse_params({**values, "rollout": {"tasks": 96}})
    with pytest.raises(ParamsError, match=f"{reader}.*rollout.tasks is 0: set it above 0"):
        parse_params(values)


def test_what_reads_no_rollouts_runs_without_them() -> None:
    off = {"domains": ["search"], "per_domain": {"search": {}}}
    for rl in (
        {},
        {"algorithm": "archer_offline", "replay": {"records": ["demonstrations", "games"]}},
        {"algorithm": "ppo"},
        {"curriculum": {"kind": "uniform"}},
    ):
        assert parse_params({**off, "rl": rl}).rollout.tasks == 0
    no_trees = {"annotate": {"tasks": 0, "evaluation": {"kind": "mixed"}}}  # so no leaf needs a value
    assert parse_params({**off, **no_trees}).annotate.tasks == 0
