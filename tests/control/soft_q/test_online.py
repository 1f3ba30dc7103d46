"""ARSQ on Gymnasium tasks: figures, demonstrations from a data set, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from stages.control.offline.datasets import DataSet, PlayedEpisode, write_dataset
from stages.control.soft_q import online
from stages.control.soft_q.online import demonstrations_of, learn, run
from stages.control.soft_q.settings import SoftQTask
from stages.runtime.validation import ParamsError

TINY: dict[str, Any] = {
    "steps": 40,
    "evaluate_every": 20,
    "evaluate_episodes": 1,
    "warm_up": 10,
    "batch": 8,
    "width": 8,
    "bins": 5,
}


def settings(**values: Any) -> SoftQTask:
    return SoftQTask.model_validate({**TINY, **values})


def stored(folder: Path, observations: int = 3) -> None:
    """Two episodes of a data set of Pendulum, with torques of 1 and -2 of at most 2."""
    seen = np.zeros((4, observations), "f4")
    episodes = [PlayedEpisode(seen + number, np.full((3, 1), torque, "f4"), np.full(3, -float(number + 1)), False)
                for number, torque in enumerate((1.0, -2.0))]  # fmt: skip
    write_dataset(folder, DataSet("pendulum/mixed-v0", "Pendulum-v1", episodes), "by hand")


def test_one_dimension_plays_alike_with_and_without_conditioning() -> None:
    """Contract: D = 1 and one level leave nothing to condition on."""
    found = [run(settings(condition=condition)) for condition in ("prefix", "none")]
    assert found[0] == found[1]
    assert found[0]["updates"] == 30.0
    assert found[0]["least_advantage"] <= -0.05 * np.log(5)
    assert len(learn(settings(task="MountainCarContinuous-v0", updates_per_step=2)).returns) == 2


def test_demonstrations_are_a_data_set_in_the_tasks_units(tmp_path: Path) -> None:
    """Torques of 1 and -2 of at most 2 are actions of 0.5 and -1; rewards are scaled."""
    stored(tmp_path)
    chosen = settings(folder=str(tmp_path), dataset="pendulum/mixed-v0", reward_scale=0.1, demonstration_share=0.25)
    demonstrations = demonstrations_of(chosen)
    assert demonstrations is not None
    assert demonstrations.data.action.flatten().tolist() == [0.5] * 3 + [-1.0] * 3
    assert demonstrations.data.reward.tolist() == pytest.approx([-0.1] * 3 + [-0.2] * 3)
    assert not demonstrations.data.terminated.any()
    assert demonstrations.rows(chosen.batch) == 2
    with_term = chosen.model_copy(update={"demo": chosen.demo.model_copy(update={"kind": "logsumexp"})})
    assert run(with_term) != run(chosen) != run(settings(reward_scale=0.1))


def test_a_data_set_of_another_shape_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, observations=4)
    with pytest.raises(ParamsError, match="has observations of 4 and actions of 1 numbers, Pendulum-v1 of 3 and 1"):
        run(settings(folder=str(tmp_path), dataset="pendulum/mixed-v0"))
    with pytest.raises(ParamsError, match="nowhere"):
        run(settings(folder=str(tmp_path), dataset="nowhere/none-v0"))


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    given.write_text(yaml.safe_dump({**TINY, "seed": 3}))
    monkeypatch.setattr("sys.argv", ["online", "--settings", str(given), "--result", str(result)])
    assert online.main() == 0
    expected = {f"control.{name}": value for name, value in run(settings(seed=3)).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"folder": "elsewhere"}, "folder has no effect: it needs a dataset"),
        ({"demonstration_share": 0.1}, "demonstration_share has no effect: it needs a dataset"),
        ({"demo": {"kind": "margin"}}, "demo: there are no demonstrations in a batch; remove demo, or name a dataset"),
        ({"act_network": "both"}, "Input should be 'online' or 'target'"),
        ({"dataset": "a/b-v0", "distractors": 2}, "distractors 2: observations of a dataset have none; remove one of them"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**values)
