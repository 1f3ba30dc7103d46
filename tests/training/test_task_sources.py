"""Task sources and roles in stage rl: an outside source whose state resumes exactly, and losses by role."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from stages.agent.active_episode import EpisodeRequest
from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.registry import composition
from stages.algorithms.settings import Rl
from stages.algorithms.task_source import TaskSource
from stages.records.episode import ROLE_COLUMNS, Episode, read_episodes, read_rows, write_episodes
from stages.records.task import Task
from stages.runtime import entry_points
from stages.runtime.validation import Count, ParamsError, Section
from stages.training.rl.job import restore
from training.toys import SHORT_RUN, KilledError, kill_at_step, make_episode, outputs, run


class RelaySource(TaskSource):
    """Tasks that are renamed in every step, and one episode of a helper before each; the helper is paid what the step's episodes
    earned in the mean."""

    class Settings(Section):
        rooms: Count = 2

    roles = ("helper",)
    main_role = "worker"

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        self.told: list[str] = []
        self.helped: list[Episode] = []

    def begin(self, step: int) -> None:
        tasks = [replace(task, task_id=f"help-{step}-{task.task_id}") for task in self.drawn(step)]
        self.helped = self.inputs.play([EpisodeRequest(task, 0, task.task_id, "helper") for task in tasks], None)
        self.told += [episode.turns[0].action for episode in self.helped]

    def drawn(self, step: int) -> list[Task]:
        return [self.inputs.tasks[name] for name in sorted(self.inputs.tasks)[: self.inputs.rl.tasks.settings.rooms]]

    def draw(self, *key: object, count: int | None = None, without: Collection[str] = ()) -> list[Task]:
        tasks = [replace(task, task_id=f"{len(self.told):03d}-{task.task_id}") for task in self.drawn(0)]
        return [task for task in tasks if task.task_id not in without][:count]

    def observe(self, step: int, episodes: Sequence[Episode]) -> None:
        earned = sum(episode.reward for episode in episodes) / len(episodes)
        for episode in self.helped:
            episode.reward = episode.turns[-1].reward = earned
            episode.turns[0].reward = 0.0

    def role_episodes(self) -> Mapping[str, Sequence[Episode]]:
        return {"helper": self.helped}

    def metrics(self) -> dict[str, float]:
        return {"told": float(len(self.told))}

    def report(self) -> dict[str, Any]:
        return {"told": len(self.told)}

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = state["told"]


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs RelaySource as another package's source `relay`."""
    group = "bellwether.task_sources"
    point = EntryPoint("relay", "training.test_task_sources:RelaySource", group)
    installed = entry_points._installed
    monkeypatch.setattr(
        entry_points, "_installed", lambda name, path: {"relay": point} if name == group else installed(name, path)
    )


RELAY: dict[str, Any] = {
    **SHORT_RUN,
    "steps": 2,
    "tasks": {"source": "relay", "settings": {"rooms": 2}},
    "roles": {"helper": {"advantage": {"mean": "none", "std": "none"}, "loss": {"clip_high": 0.3}}},
}


def test_an_outside_source_trains_roles_and_resumes_exactly(make_context: Any, relay: None) -> None:
    """Contract: a source's state is in the checkpoint, so that a killed run ends with the same bytes; episodes of each role are
    trained with the role's own advantages; records say who spoke."""
    whole, killed = make_context("rl", "whole", rl=RELAY), make_context("rl", "killed", rl=RELAY)
    rows = run(whole)
    kill_at_step(killed, 2)
    with pytest.raises(KilledError):
        run(killed)
    killed = make_context("rl", "killed", rl=RELAY)
    run(killed)
    assert outputs(whole.root) == outputs(killed.root)

    assert [row["told"] for row in rows] == [2.0, 4.0]
    assert [row["helper/episodes"] for row in rows] == [2.0, 2.0]
    assert [row["episodes"] for row in rows] == [10.0, 10.0]
    assert [row["environment_steps"] for row in rows] == [20.0, 20.0]
    assert all("helper/loss" in row for row in rows)
    assert all(row["helper/reward_mean"] == pytest.approx(row["success"]) for row in rows)

    samples = read_rows(whole.root / "data/rl/toy/samples.parquet")
    assert {(sample["role"], sample["step"]) for sample in samples} == {
        (who, step) for who in ("worker", "helper") for step in (1, 2)
    }
    earned = {int(row["step"]): row["success"] for row in rows}
    for sample in (sample for sample in samples if sample["role"] == "helper"):
        own = {value for value, owner in zip(sample["advantages"], sample["owner"], strict=True) if owner == 1}
        assert list(own) == pytest.approx([earned[sample["step"]]]), "its reward, without a baseline"


def test_role_settings_are_layered_and_checked(relay: None) -> None:
    """By hand: the role's keys over the section's, which the role's other keys keep."""
    algorithm = resolve(Rl.model_validate({**RELAY, "algorithm": "dapo", "learning_rate": 0.5}), 128)
    own = algorithm.of_role("helper")
    assert (algorithm.rl.loss.clip_high, own.rl.loss.clip_high, own.rl.loss.clip_low) == (0.28, 0.3, algorithm.rl.loss.clip_low)
    assert (algorithm.rl.advantage.std, own.rl.advantage.std, own.rl.learning_rate) == ("group", "none", 0.5)
    assert algorithm.rl.tasks.settings.rooms == 2
    for change, message in (
        ({"roles": {"reader": {}}}, r"rl\.roles\.reader has no effect: the roles of rl\.tasks\.source relay are helper"),
        ({"roles": {"helper": {"steps": 3}}}, r"rl\.roles\.helper\.steps: a role can have its own advantage, loss"),
        ({"roles": {"helper": {"loss": {"clip": 3}}}}, r"rl\.roles\.helper\.loss\.clip"),
        ({"roles": {"helper": {"advantage": {"gamma": 0.5}}}}, r"rl\.roles\.helper: rl\.advantage\.gamma has no effect"),
        ({"tasks": {"source": "relay", "settings": {"room": 2}}}, r"rl\.tasks\.settings\.room"),
        ({"tasks": {"source": "relais"}, "roles": {}}, "unknown rl.tasks.source 'relais'; did you mean 'relay'"),
        ({"imitation": {"ratio": 0.5}}, r"rl\.imitation\.ratio is about tasks that curate wrote"),
        ({"algorithm": "ppo", "steps": 9}, r"rl\.advantage\.estimator gae has one critic"),
        ({"reward": {"kind": "judge"}}, r"rl\.reward\.kind judge scores answers, not what helper"),
    ):
        with pytest.raises(ParamsError, match=message):
            resolve(Rl.model_validate({**RELAY, **change}), 128)


def test_role_columns_exist_only_where_a_role_does(tmp_path: Any) -> None:
    """Contract: tables of runs without roles keep their bytes."""
    plain, spoken = make_episode("a/0", "a", [2], 1.0), replace(make_episode("b/0", "b", [2], 1.0), role="solver")
    write_episodes(tmp_path / "plain.parquet", [plain])
    write_episodes(tmp_path / "roles.parquet", [plain, spoken])
    added = {name for name, _ in ROLE_COLUMNS}
    assert not added & set(read_rows(tmp_path / "plain.parquet")[0])
    assert added <= set(read_rows(tmp_path / "roles.parquet")[0])
    assert read_episodes(tmp_path / "plain.parquet")[0].role == ""
    assert [(one.role, one.play, one.moves) for one in read_episodes(tmp_path / "roles.parquet")] == [
        ("", "", []),
        ("solver", "", []),
    ]


def test_a_role_goes_on_with_the_restored_state() -> None:
    """Its algorithm holds a dictionary within the algorithm's, which must stay the same one."""
    method = replace(composition("ssp"), state=dict)
    algorithm = Algorithm(method, resolve(Rl(algorithm="ssp"), 100).rl, method.state())
    role = algorithm.of_role("proposer")
    restore(algorithm.state, {"role proposer": {"baseline": 0.7}})
    assert role.state == {"baseline": 0.7}
    role.state["baseline"] = 0.1
    assert algorithm.state == {"role proposer": {"baseline": 0.1}}
