"""Stages that run programs look for a sandbox first: they report which one they use, and exit early without one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stages import params
from stages.curation.panel import make_panel, write_panel
from stages.environments.code import CodeDomain, CodeSettings
from stages.environments.registry import open_domain
from stages.records.episode import write_json, write_tasks
from stages.runtime import stage as runtime
from stages.runtime.stage import BAD_PARAMETERS, stage_run
from stages.runtime.validation import ParamsError
from stages.sandbox import SandboxSettings, probe
from stages.tracking import open_tracker

STAGES = ("curate", "rollout", "annotate", "rl", "evaluate")
UNSAFE = SandboxSettings(backend="unsafe_subprocess")


@pytest.fixture(autouse=True)
def _clear_choice() -> Iterator[None]:
    probe._choose.cache_clear()
    yield
    probe._choose.cache_clear()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with curated tasks of the domain `code` and no model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLWETHER_TRACKING", "off")
    monkeypatch.delenv("BELLWETHER_DEBUG", raising=False)
    monkeypatch.setattr(runtime, "die_with_parent", lambda: None)
    folder = tmp_path / "data/curated/code"
    domain = CodeDomain(CodeSettings(sandbox=UNSAFE))
    tasks = domain.build(list(domain.recipes(20, 0)), folder / "worlds", 1)
    write_tasks(folder / "tasks.parquet", tasks)
    write_panel(folder / "panel.json", make_panel(domain, tasks, folder / "worlds"))
    write_json(tmp_path / "data/rollouts/code/difficulty.json", {task.task_id: 0.5 for task in tasks})
    return tmp_path


def exit_code(name: str, project: Path, monkeypatch: pytest.MonkeyPatch, rl: dict[str, object] | None = None) -> int:
    """Run a stage without a model and return its exit code."""
    environment = {"sandbox": UNSAFE.model_dump()}
    own = {"environment": environment, "rollout": {"tasks": 96}, "annotate": {"tasks": 48}}
    values = {"domains": ["code"], "per_domain": {"code": own}, "rl": rl or {}}
    (project / "params.yaml").write_text(yaml.safe_dump(values))
    per_domain = name != "evaluate"
    monkeypatch.setattr(sys, "argv", [name, *(["--domain", "code"] if per_domain else [])])
    stage = importlib.import_module(f"stages.{name}")
    return stage_run(name, stage.run, params, open_tracker, per_domain=per_domain)


@pytest.mark.parametrize("name", STAGES)
def test_stage_without_sandbox_exits_with_bad_parameters(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: exit code 2 and the reason, before a model is loaded (there is none, which would be another error)."""
    monkeypatch.setattr(probe, "fault", lambda backend: f"{backend} is missing: install it")
    assert exit_code(name, project, monkeypatch) == BAD_PARAMETERS
    stderr = capsys.readouterr().err
    assert "no sandbox is available on this machine" in stderr
    assert "- unsafe_subprocess: unsafe_subprocess is missing: install it" in stderr


@pytest.mark.parametrize("name", STAGES[1:])
def test_stage_reports_its_sandbox_first(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: the stage's own process reports it once, and warns if programs are not isolated."""
    assert exit_code(name, project, monkeypatch) != 0
    stderr = capsys.readouterr().err
    assert stderr.startswith("sandbox: WARNING: sandbox.backend is unsafe_subprocess")
    assert stderr.count("sandbox: WARNING") == 1
    assert "data/models" in stderr or "data/base" in stderr, stderr


def test_learning_from_pairs_needs_no_sandbox(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: a method without rollouts does not look for a sandbox."""
    assert exit_code("rl", project, monkeypatch, {"algorithm": "dpo"}) != 0
    stderr = capsys.readouterr().err
    assert "data/models/sft" in stderr, stderr
    assert "sandbox" not in stderr


def test_domains_without_programs_need_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "fault", lambda backend: "it is missing")
    assert open_domain("calculator").name == "calculator"
    with pytest.raises(ParamsError, match="no sandbox is available on this machine"):
        open_domain("code")
