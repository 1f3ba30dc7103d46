"""Data sets in Minari's format, and learning from them: round trips, hashes, losses by hand, exact resume, refusals by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from stages.control.off_policy.vector_task import VectorTask
from stages.control.offline.agents import Clone, expectile_loss
from stages.control.offline.collecting import make
from stages.control.offline.datasets import DataSet, PlayedEpisode, content_hash, read_dataset, write_dataset
from stages.control.offline.settings import KINDS, DataSets, Offline
from stages.control.offline.training import Training, transitions
from stages.runtime.lineage import dvc_hash
from stages.runtime.validation import ParamsError

AGENT = {"task": "Pendulum-v1", "steps": 80, "evaluate_every": 20, "warm_up": 10, "batch": 8, "width": 8, "evaluate_episodes": 1}
SETS = DataSets(agent=AGENT, medium_return=-2500.0, episodes=2)
TINY: dict[str, Any] = {"updates": 20, "evaluate_every": 10, "batch": 16, "width": 8, "evaluate_episodes": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    make(root / "control", "pendulum", SETS, root / "scratch")
    return root / "control"


def offline(folder: Path, **values: Any) -> Offline:
    return Offline.model_validate({**TINY, "folder": str(folder), **values})


def test_all_kinds_are_made_and_read_back(made: Path) -> None:
    found = {kind: read_dataset(made, f"pendulum/{kind}-v0") for kind in KINDS}
    assert [len(found[kind].episodes) for kind in KINDS] == [2, 2, 1, 2]
    assert [found[kind].steps for kind in KINDS] == [400, 400, 20, 400]
    assert {data.task for data in found.values()} == {"Pendulum-v1"}
    for data in found.values():
        assert all(np.abs(one.actions).max() <= 2.0 and not one.terminated for one in data.episodes)
    assert max(np.abs(one.actions).max() for one in found["random"].episodes) > 1.5


def test_the_replay_set_is_what_the_task_does(made: Path) -> None:
    """Its transitions are those of Pendulum's equations: the next angular velocity follows from observation and action."""
    for episode in read_dataset(made, "pendulum/replay-v0").episodes:
        cos, sin, speed = episode.observations[:-1].T
        expected = (speed + (15.0 * sin + 3.0 * episode.actions[:, 0]) * 0.05).clip(-8.0, 8.0)
        assert np.allclose(episode.observations[1:, 2], expected, atol=1e-4)
        angle = np.arctan2(sin, cos)
        assert np.allclose(episode.rewards, -(angle**2 + 0.1 * speed**2 + 0.001 * episode.actions[:, 0] ** 2), atol=1e-4)


def test_minari_reads_them(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(made))
    theirs, ours = minari.load_dataset("pendulum/expert-v0"), read_dataset(made, "pendulum/expert-v0")
    assert theirs.total_episodes == len(ours.episodes)
    assert theirs.total_steps == ours.steps
    assert theirs.spec.env_spec.id == "Pendulum-v1"
    for one, other in zip(theirs, ours.episodes, strict=True):
        for name in ("observations", "actions", "rewards"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert one.truncations[-1]
        assert not one.truncations[:-1].any()
        assert not one.terminations.any()
    assert theirs.observation_space == theirs.recover_environment().observation_space


def test_data_sets_of_minari_s_own_are_read(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another of its formats. Without Minari the extra is named."""
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    ours = read_dataset(made, "pendulum/random-v0")
    buffers = [
        minari.data_collector.EpisodeBuffer(
            observations=list(one.observations),
            actions=list(one.actions),
            rewards=list(one.rewards),
            terminations=[False] * len(one.rewards),
            truncations=[False] * (len(one.rewards) - 1) + [True],
        )
        for one in ours.episodes
    ]
    minari.create_dataset_from_buffers("theirs/random-v0", buffers, env="Pendulum-v1", data_format="arrow")
    found = read_dataset(tmp_path, "theirs/random-v0")
    assert content_hash(found.episodes) == content_hash(ours.episodes)
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'bellwether\[control\]'"):
        read_dataset(tmp_path, "theirs/random-v0")


def test_making_them_again_after_a_kill_gives_the_same_bytes(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended between the half-trained agent and the end of training."""
    from stages.control.offline import collecting

    rounds = collecting.Training.round

    def killed(training: Any) -> None:
        if training.steps >= 60:
            raise KeyboardInterrupt
        rounds(training)

    monkeypatch.setattr(collecting.Training, "round", killed)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "control", "pendulum", SETS, tmp_path / "scratch")
    monkeypatch.setattr(collecting.Training, "round", rounds)
    make(tmp_path / "control", "pendulum", SETS, tmp_path / "scratch")
    assert dvc_hash(tmp_path / "control") == dvc_hash(made)


def test_a_return_that_is_never_reached_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="medium_return 0 was not reached in 80 steps"):
        make(tmp_path / "control", "pendulum", SETS.model_copy(update={"medium_return": 0.0}), tmp_path / "scratch")


def test_a_changed_file_is_noticed(made: Path, tmp_path: Path) -> None:
    data = read_dataset(made, "pendulum/random-v0")
    write_dataset(tmp_path, data, "random")
    path = tmp_path / "pendulum/random-v0/data"
    (path / "0/part-0.parquet").write_bytes((path / "1/part-0.parquet").read_bytes())
    with pytest.raises(ParamsError, match="is not what was written: its hash differs"):
        read_dataset(tmp_path, "pendulum/random-v0")
    (path / "0/part-0.parquet").write_bytes(b"nothing")
    with pytest.raises(ParamsError, match=r"is damaged .*`dvc repro reports/control"):
        read_dataset(tmp_path, "pendulum/random-v0")


def test_missing_and_foreign_data_are_refused_by_name(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"pendulum/expart-v0 does not exist\. Did you mean 'pendulum/expert-v0'"):
        Training(offline(made, dataset="pendulum/expart-v0"))
    (tmp_path / "a/b-v0/data").mkdir(parents=True)
    (tmp_path / "a/b-v0/data/metadata.json").write_text(json.dumps({"total_episodes": 1}))
    with pytest.raises(ParamsError, match="is not Minari's metadata"):
        read_dataset(tmp_path, "a/b-v0")
    with pytest.raises(ParamsError, match="Gymnasium has no Pendulun-v1"):
        Training(offline(made, task="Pendulun-v1"))
    with pytest.raises(ParamsError, match="observations of 3 and actions of 1 numbers, MountainCarContinuous-v0 of 2 and 1"):
        Training(offline(made, task="MountainCarContinuous-v0"))


def played(observations: int, actions: int = 1) -> PlayedEpisode:
    """Two steps of so many numbers each."""
    return PlayedEpisode(np.zeros((3, observations), "f4"), np.zeros((2, actions), "f4"), np.zeros(2), False)


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([played(3), played(4)], "observations of episode 1 in .* have 4 numbers, those before 3; use data of one task"),
        ([played(3), played(3, 2)], "actions of episode 1 in .* have 2 numbers, those before 1"),
        ([], "has no episodes"),
    ],
)
def test_data_of_no_one_shape_are_refused_by_name(episodes: list[PlayedEpisode], message: str, tmp_path: Path) -> None:
    """Contract: what another tool wrote, without our hash, is checked before it is learnt from."""
    write_dataset(tmp_path, DataSet("a/b-v0", "Pendulum-v1", episodes or [played(3)]), "someone")
    file = tmp_path / "a/b-v0/data/metadata.json"
    metadata = json.loads(file.read_text())
    file.write_text(
        json.dumps({**{name: metadata[name] for name in metadata if name != "sha256"}, "total_episodes": len(episodes)})
    )
    with pytest.raises(ParamsError, match=message):
        Training(offline(tmp_path, dataset="a/b-v0"))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (
            "observations",
            [{"goal": 1.0}] * 3,
            "observations of episode 0 in .* are no arrays of numbers; learning needs a vector",
        ),
        ("observations", [0, 1, 2], r"observations of episode 0 in .* are of shape \(3,\)"),
        ("observations", [[1.0], [1.0, 2.0], [1.0]], "is damaged"),
        ("rewards", [0.0, float("nan"), 0.0], "rewards of episode 0 in .* are not all finite"),
    ],
)
def test_episodes_of_no_vectors_are_refused_by_name(column: str, values: list[Any], message: str, tmp_path: Path) -> None:
    """Such as those of Minari's goal-conditioned tasks, whose observations are mappings, or of tasks with numbered states."""
    write_dataset(tmp_path, DataSet("a/b-v0", "Pendulum-v1", [played(3)]), "someone")
    file = tmp_path / "a/b-v0/data/0/part-0.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, pa.array(values)), file)
    with pytest.raises(ParamsError, match=message):
        read_dataset(tmp_path, "a/b-v0")


def test_actions_and_ends_by_hand() -> None:
    """Torques between -2 and 2 become actions between -1 and 1; only the end of a task that is over is terminal."""
    episodes = [
        PlayedEpisode(np.zeros((3, 3), "f4"), np.array([[-2.0], [1.0]], "f4"), np.array([1.0, 2.0]), True),
        PlayedEpisode(np.ones((2, 3), "f4"), np.array([[2.0]], "f4"), np.array([4.0]), False),
    ]
    found = transitions(DataSet("a/b-v0", "Pendulum-v1", episodes), VectorTask("Pendulum-v1", 1), 0.5)
    assert found.action[:, 0].tolist() == [-1.0, 0.5, 1.0]
    assert found.reward.tolist() == [0.5, 1.0, 2.0]
    assert found.terminated.tolist() == [0.0, 1.0, 0.0]


def test_expectiles_by_hand() -> None:
    """At 0.5 half the squared error; at 0.9 an error upwards counts nine times as much as one downwards."""
    differences = torch.tensor([2.0, -2.0])
    assert expectile_loss(differences, 0.5).tolist() == [2.0, 2.0]
    assert expectile_loss(differences, 0.9).tolist() == pytest.approx([3.6, 0.4])


def test_iql_without_weights_is_behaviour_cloning(made: Path) -> None:
    """The policy's gradients are the same at inverse temperature 0."""
    data = Training(offline(made, method="bc")).data.everything()
    gradients = []
    for method in ("bc", "iql"):
        torch.manual_seed(0)
        values = {"inverse_temperature": 0.0} if method == "iql" else {}
        agent = Clone(offline(made, method=method, **values), 3, 1)
        agent.loss(data).backward()
        gradients.append(torch.cat([one.grad.flatten() for one in agent.policy.parameters()]))
    assert torch.allclose(*gradients, atol=1e-6)


@pytest.mark.parametrize("method", ["bc", "iql", "sac"])
def test_a_run_goes_on_exactly(method: str, made: Path, tmp_path: Path) -> None:
    settings = offline(made, method=method)
    whole = Training(settings)
    whole.train()
    path = tmp_path / "run.pt"
    first = Training(settings.model_copy(update={"checkpoint": str(path)}))
    first.round()
    first.save(path)
    later = Training(settings.model_copy(update={"checkpoint": str(path)}))
    later.train()
    assert later.returns == whole.returns
    assert len(whole.returns) == 2
    other = Training(settings.model_copy(update={"checkpoint": str(path), "dataset": "pendulum/random-v0"}))
    with pytest.raises(ParamsError, match="other settings or data"):
        other.load(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "bc", "critics": 4}, "critics has no effect: it needs method: iql or sac"),
        ({"method": "sac", "expectile": 0.9}, "expectile has no effect: it needs method: iql"),
        ({"diversity": 1.0}, "diversity has no effect: it needs method: sac"),
        ({"updates": 15, "evaluate_every": 10}, "multiple of evaluate_every"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Offline.model_validate(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"agent": {**AGENT, "distractors": 2}}, "without distractors"),
        ({"agent": {**AGENT, "replay": 30}}, "can't hold the replay set of up to 80 steps"),
        ({"agent": {**AGENT, "stepz": 30}}, "agent: unknown key 'stepz'. Did you mean 'steps'"),
        ({"agent": {**AGENT, "batch": -1}}, "agent: 'batch' Input should be greater than or equal to 1"),
    ],
)
def test_bad_settings_of_data_sets_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataSets.model_validate({"agent": AGENT, "medium_return": -500.0, **values})
