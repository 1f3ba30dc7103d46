"""How long the lane takes: recorded outside of DVC's outputs, and summed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from stages.control import __main__ as command
from stages.control.lane import timing
from stages.control.lane.settings import PARAMS, load_lane
from stages.runtime.costs import Cost, cost_file, read_cost, uptime
from stages.runtime.tracker import Tracker

ROOT = Path(__file__).resolve().parents[3]
LANE: dict[str, Any] = {
    "seeds": 2,
    "film": None,
    "data": {"pendulum": {"agent": {"task": "Pendulum-v1"}, "medium_return": -700.0}},
    "methods": {"r2pvi": {"problem": "linear_mdp"}, "pevi": {"problem": "linear_mdp", "settings": {"robust": "none"}}},
}


def write_lane(root: Path) -> None:
    (root / PARAMS).parent.mkdir(parents=True)
    (root / PARAMS).write_text(yaml.safe_dump(LANE))


def write_cost(root: Path, title: str, **values: Any) -> None:
    path = cost_file(root, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"inputs": "x", "machine": "two cores", **values}))


def test_the_sum_by_hand(tmp_path: Path) -> None:
    """45 s of data and 2 min 20 s of a method; a run that was ended before it was finished does not count."""
    write_lane(tmp_path)
    write_cost(tmp_path, "control.data.pendulum", seconds=45.0, done=True)
    write_cost(tmp_path, "control.r2pvi", seconds=140.0, done=True)
    write_cost(tmp_path, "control.pevi", seconds=1000.0, done=False)
    lines = timing.table(tmp_path, load_lane(tmp_path / PARAMS)).splitlines()
    assert [line.split(maxsplit=1)[0] for line in lines[1:3]] == ["r2pvi", "all"]
    assert lines[0].split("  ")[0] == "data set pendulum"
    assert [line.rpartition("  ")[2].strip() for line in lines[:3]] == ["45 s", "2 min 20 s", "3 min 05 s"]
    assert lines[3:] == ["not run here: pevi, page", "two cores"]


def test_a_run_records_its_time_beside_its_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the seconds are in the cost file and in MLflow, and not in what DVC stores."""
    write_lane(tmp_path)
    for part in ("control", "values", "records", "seeding.py", "environments/wordle/rules.py"):
        place = tmp_path / "stages" / part
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(ROOT / "stages" / part)
    logged: dict[str, float] = {}

    class Recording(Tracker):
        def metric(self, name: str, value: float, step: int | None = None) -> None:
            logged[name] = value

    monkeypatch.setattr(command, "tracked", lambda *_: Recording())
    threads = torch.get_num_threads()
    command.run_method(tmp_path, load_lane(tmp_path / PARAMS), "r2pvi", 1, began=uptime())
    torch.set_num_threads(threads)
    cost = read_cost(tmp_path, "control.r2pvi")
    assert isinstance(cost, Cost)
    assert cost.done
    assert logged["control/seconds"] == cost.seconds > 0
    stored = json.loads((tmp_path / "reports/control/runs/r2pvi/result.json").read_text())
    assert set(stored) == {"problem", "task", "seeds", "steps", "returns", "figures"}
    assert not any("second" in figure for figure in stored["figures"])
