"""A flow run's stages that were not executed are told to MLflow, and nothing that goes wrong there fails the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.pipeline import StageResult
from flows.tracked import arguments, log_to_mlflow, run_environment

DONE = [StageResult(("rl@a",), ("rl@b",), ()), StageResult((), (), ("merge",))]


def test_every_stage_comes_with_what_dvc_did() -> None:
    assert arguments(DONE) == ["--state", "rl@a=ran", "--state", "rl@b=restored", "--state", "merge=unchanged"]


def test_the_flow_runs_identity_and_name_reach_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stages" / "tracking").mkdir(parents=True)
    for package in ("stages", "stages/tracking"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "stages" / "tracking" / "__main__.py").write_text(
        "import os, sys\nprint(os.environ['LIFECYCLE_RUN_ID'], os.environ['LIFECYCLE_RUN_NAME'], *sys.argv[1:3])\nsys.exit(1)\n"
    )
    said: list[str] = []
    log_to_mlflow(DONE, tmp_path, run_environment("id-1", "wise-owl"), said.append)
    assert said == ["MLflow: id-1 wise-owl --state rl@a=ran"]
    log_to_mlflow(DONE, tmp_path / "elsewhere", run_environment("id-1", "wise-owl"), said.append)
    assert len(said) == 1
