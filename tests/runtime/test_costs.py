"""The costs of a stage; a failure to record them does not stop it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.runtime.costs import cost_file, machine, measured, read_cost


def test_costs_of_a_resumed_run_add_up(tmp_path: Path) -> None:
    """Contract: an interrupted run and its continuation add up, as long as their inputs are the same."""
    with pytest.raises(KeyboardInterrupt), measured(tmp_path, "rl@search", "a"):
        raise KeyboardInterrupt
    stopped = read_cost(tmp_path, "rl@search")
    assert stopped is not None
    assert (stopped.done, stopped.runs) == (False, 1)
    with measured(tmp_path, "rl@search", "a"):
        sum(range(200_000))
    done = read_cost(tmp_path, "rl@search")
    assert done is not None
    assert (done.done, done.runs, done.inputs) == (True, 2, "a")
    assert done.seconds > stopped.seconds
    assert done.peak_bytes > 1_000_000
    assert done.machine == machine()
    with measured(tmp_path, "rl@search", "a"):
        pass
    assert read_cost(tmp_path, "rl@search").runs == 1, "a finished run is not added to"


def test_changed_inputs_reset_the_costs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), measured(tmp_path, "sft", "a"):
        raise ValueError("broken")
    with measured(tmp_path, "sft", "b"):
        pass
    cost = read_cost(tmp_path, "sft")
    assert cost is not None
    assert (cost.runs, cost.inputs) == (1, "b")


def test_unwritable_cost_file_is_reported_and_not_fatal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".bellwether").write_text("a file where the folder should be")
    with measured(tmp_path, "sft", "a"):
        pass
    assert "sft: cannot write its cost" in capsys.readouterr().err


def test_damaged_cost_file_is_ignored(tmp_path: Path) -> None:
    cost_file(tmp_path, "sft").parent.mkdir(parents=True)
    cost_file(tmp_path, "sft").write_text('{"inputs": ')
    assert read_cost(tmp_path, "sft") is None
