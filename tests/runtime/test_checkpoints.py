"""Checkpoints are complete or absent, and valid only for the inputs they were written with."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
import yaml

from stages.params import parse_params
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker

PARAMS = {"domains": ["search"], "rl": {"steps": 3}, "per_domain": {"search": {}}}
PIPELINE = {"stages": {"rl": {"cmd": "-", "deps": ["data/in"], "params": ["rl", "per_domain.${item.domain}.rl"]}}}


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump(PIPELINE))
    (tmp_path / "data" / "in").mkdir(parents=True)
    (tmp_path / "data" / "in" / "tasks").write_text("one")
    return StageContext("rl", "search", parse_params(PARAMS), tmp_path, Tracker())


def test_saved_checkpoint_is_loaded(context: StageContext) -> None:
    value = {"step": 3, "weights": torch.arange(4.0), "rows": [{"reward": 1.0}]}
    Checkpoints(context).save("state", value)
    loaded = Checkpoints(context).load("state")
    assert loaded["step"] == 3
    assert loaded["rows"] == value["rows"]
    assert torch.equal(loaded["weights"], value["weights"])
    assert Checkpoints(context).load("other") is None


@dataclass
class Row:
    reward: float
    parts: list[Row] = field(default_factory=list)


def test_registered_dataclasses_are_restored(context: StageContext) -> None:
    value = [Row(1.0, [Row(2.0)]), Row(3.0)]
    Checkpoints(context, classes=(Row,)).save("rows", value)
    assert Checkpoints(context, classes=(Row,)).load("rows") == value


class RunsCode:
    """A malicious value: unpickling it runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_loading_a_checkpoint_runs_no_code(context: StageContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: write access to the checkpoint folder does not allow code execution in the account that resumes."""
    checkpoints = Checkpoints(context)
    checkpoints.folder.mkdir(parents=True)
    for zipped in (True, False):
        hostile = {"weights": RunsCode(tmp_path / "ran")}
        torch.save(hostile, checkpoints.path("state"), _use_new_zipfile_serialization=zipped)
        assert checkpoints.load("state") is None
        assert not (tmp_path / "ran").exists()
        message = capsys.readouterr().out
        assert "cannot be read" in message
        assert message.count("\n") == 1


def test_unloadable_value_is_rejected_on_save(context: StageContext) -> None:
    """Contract: a value that could not be loaded is rejected when it is saved; the previous checkpoint stays."""
    checkpoints = Checkpoints(context)
    checkpoints.save("state", 1)
    for value, named in (([Row(1.0)], "Row"), ({"success": np.float64(0.5)}, "numpy")):
        with pytest.raises(TypeError, match=rf"checkpoint 'state' holds .*{named}.*Checkpoints\(classes="):
            checkpoints.save("state", value)
    assert checkpoints.load("state") == 1
    assert not list(checkpoints.folder.glob("*.partial"))


def test_checkpoints_are_outside_the_stage_outputs(context: StageContext) -> None:
    """DVC deletes a stage's outputs before it runs; checkpoints of a killed run must survive that."""
    assert Checkpoints(context).path("state").is_relative_to(context.root / ".bellwether")


@pytest.mark.parametrize("change", ["input", "parameter", "override"])
def test_changed_inputs_never_resume_from_old_state(context: StageContext, change: str) -> None:
    """Checkpoints are keyed by the hash of the stage's inputs."""
    Checkpoints(context).save("state", 1)
    if change == "input":
        (context.root / "data" / "in" / "tasks").write_text("two")
    elif change == "parameter":
        (context.root / "params.yaml").write_text(yaml.safe_dump({**PARAMS, "rl": {"steps": 4}}))
    else:
        (context.root / "params.yaml").write_text(yaml.safe_dump({**PARAMS, "per_domain": {"search": {"rl": {"steps": 4}}}}))
    assert Checkpoints(context).load("state") is None


def test_changed_parameter_of_another_stage_keeps_checkpoints(context: StageContext) -> None:
    Checkpoints(context).save("state", 1)
    (context.root / "params.yaml").write_text(yaml.safe_dump({**PARAMS, "merge": {"method": "ties"}}))
    assert Checkpoints(context).load("state") == 1


def test_damaged_checkpoint_is_reported_and_ignored(context: StageContext, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints(context)
    checkpoints.save("state", {"weights": torch.zeros(1000)})
    data = checkpoints.path("state").read_bytes()
    for damaged in (data[: len(data) // 2], b"", b"\x80not a checkpoint", bytes(1000)):
        checkpoints.path("state").write_bytes(damaged)
        assert checkpoints.load("state") is None
        assert "cannot be read" in capsys.readouterr().out


def test_full_disk_raises_and_keeps_previous_checkpoint(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(context)
    checkpoints.save("state", 1)

    def full(value: object, handle: object) -> None:
        handle.write(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"cannot write checkpoint .*state\.pt.*No space left.*MB free.*Make room"):
        checkpoints.save("state", 2)
    monkeypatch.undo()
    assert checkpoints.load("state") == 1
    assert not list(checkpoints.folder.glob("*.partial"))


def test_processes_that_save_at_once_take_turns(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: forks and shards that save what all of them need, under one name, leave a good checkpoint and do not fail."""
    checkpoints, save, together = Checkpoints(context), torch.save, threading.Barrier(2)

    def meeting(value: object, handle: IO[bytes]) -> None:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.3)  # both are here if nothing keeps them apart
        save(value, handle)

    monkeypatch.setattr(torch, "save", meeting)
    with ThreadPoolExecutor(2) as pool:
        for saved in [pool.submit(checkpoints.save, "weights", {"weights": torch.zeros(1000)}) for _ in range(2)]:
            saved.result()
    assert checkpoints.load("weights")["weights"].shape == (1000,)


def test_kill_during_save_keeps_previous_checkpoint(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sees the old or the new file, never a partial one: the file is renamed into place once complete."""
    checkpoints = Checkpoints(context)
    checkpoints.save("state", 1)

    class Killed(BaseException):
        pass

    def killed(value: object, handle: object) -> None:
        handle.write(b"part")
        raise Killed

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(Killed):
        checkpoints.save("state", 2)
    monkeypatch.undo()
    assert checkpoints.load("state") == 1


def test_clear_also_removes_checkpoints_of_earlier_inputs(context: StageContext) -> None:
    Checkpoints(context).save("state", 1)
    (context.root / "data" / "in" / "tasks").write_text("two")
    later = Checkpoints(context)
    later.save("state", 2)
    later.clear()
    assert not later.parent.exists()
