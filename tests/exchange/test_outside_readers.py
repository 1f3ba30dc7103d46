"""Inspect's and Harbor's own readers open what this project exports, and this project reads what Inspect writes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from exported_episodes import OPENING, varied
from outside_viewers import lacking, viewers

from stages.exchange.documents import write_documents
from stages.exchange.foreign import read_items
from stages.records.episode import Episode

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())
READ = """
import json, sys
from pathlib import Path
from inspect_ai.log import read_eval_log, write_eval_log
from harbor.models.trajectories import Trajectory
from harbor.utils.trajectory_validator import TrajectoryValidator

folder, found = Path(sys.argv[1]), {}
for name in ("log.eval", "log.json"):
    log = read_eval_log(str(folder / name))
    found[name] = {f"{sample.id}#{sample.epoch}": [
        [message.text for message in sample.messages],
        {key: score.value for key, score in sample.scores.items()},
        sample.limit and sample.limit.type,
        sample.turn_count,
    ] for sample in log.samples}
    found[name + " mean"] = {score.name: score.metrics["mean"].value for score in log.results.scores}
write_eval_log(read_eval_log(str(folder / "log.eval")), str(folder / "theirs.eval"))
write_eval_log(read_eval_log(str(folder / "log.json")), str(folder / "theirs.json"))
for path in sorted((folder / "atif").iterdir()):
    validator = TrajectoryValidator()
    validator.validate(path)
    read = Trajectory.model_validate_json(path.read_text())
    found[path.name] = [validator.errors, read.trajectory_id, len(read.steps), [step.message for step in read.steps]]
    path.write_text(json.dumps(read.to_json_dict()))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def episodes(folder: Path) -> list[Episode]:
    return varied(folder / "episodes.parquet")


@pytest.fixture(scope="module")
def read(folder: Path, episodes: list[Episode]) -> dict[str, Any]:
    """What the two tools read of the exported files; they also write them again."""
    for form, name in (("inspect", "log.eval"), ("inspect", "log.json"), ("atif", "atif")):
        write_documents(folder / name, form, episodes, "merged")
    command = [str(viewers() / "bin" / "python"), "-c", READ, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["log.eval", "log.json"])
def test_inspect_reads_messages_scores_and_limits(name: str, read: dict[str, Any]) -> None:
    found = read[name]
    assert sorted(found) == ["t1#1", "t1#2", "t1#3", "t2#1", "t2#2", "t3#1"]
    scores = {"success": 1.0, "reward": 1.0, "format": 0.5}
    assert found["t1#1"] == [[OPENING, "go east", "A lamp.", "take lamp"], scores, None, 2]
    assert found["t1#2"][2] == "turn"
    assert found["t2#2"][2] == "context"
    assert read[f"{name} mean"]["success"] == pytest.approx(1 / 6)


def test_harbor_validates_every_trajectory(read: dict[str, Any], episodes: list[Episode]) -> None:
    found = [read[f"{number:05d}.json"] for number in range(len(episodes))]
    assert [errors for errors, *_ in found] == [[]] * len(episodes)
    assert [name for _, name, *_ in found] == [episode.episode_id for episode in episodes]
    assert [steps for *_, steps, _ in found] == [1 + len(episode.turns) for episode in episodes]
    assert found[0][3] == [OPENING, "go east", "take lamp"]


@pytest.mark.parametrize("name", ["theirs.eval", "theirs.json", "atif"])
def test_what_the_tools_write_again_comes_back_token_for_token(
    name: str, read: dict[str, Any], folder: Path, episodes: list[Episode]
) -> None:
    """Inspect compresses with zstd and writes its own defaults; Harbor drops empty fields."""
    back = sorted((item.episode() for item in read_items(folder / name)), key=lambda episode: episode.episode_id)
    assert back == episodes
