"""Stages that a flow run did not execute are logged to MLflow, and an error there does not fail the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.pipeline import StageResult
from flows.tracked import arguments, log_to_mlflow, run_environment

DONE = [StageResult(("rl@a",), ("rl@b",), ()), StageResult((), (), ("merge",))]


def test_arguments_give_the_state_of_every_stage() -> None:
    assert arguments(DONE) == ["--state", "rl@a=ran", "--state", "rl@b=restored", "--state", "merge=unchanged"]


def test_run_id_and_name_reach_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stages" / "tracking").mkdir(parents=True)
    for package in ("stages", "stages/tracking"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "stages" / "tracking" / "__main__.py").write_text(
        "import os, sys\nprint(os.environ['LIFECYCLE_RUN_ID'], os.environ['LIFECYCLE_RUN_NAME'], *sys.argv[1:3])\nsys.exit(1)\n"
    )
    lines: list[str] = []
    log_to_mlflow(DONE, tmp_path, run_environment("id-1", "wise-owl"), lines.append)
    assert lines == ["MLflow: id-1 wise-owl --state rl@a=ran"]
    log_to_mlflow(DONE, tmp_path / "elsewhere", run_environment("id-1", "wise-owl"), lines.append)
    assert len(lines) == 1
