"""rl through outside agents: programs in other processes that talk to the policy through OpenAI's API."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from environments.agents import OPENAI, TOY, write_agent

from stages import rl
from stages.environments.outside_agent import OutsideAgentEnvironment
from stages.records.episode import read_tasks, write_tasks
from stages.records.task import Task

RL: dict[str, Any] = {
    "steps": 2,
    "tasks_per_step": 2,
    "group_size": 2,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}


def train(make_context, monkeypatch: pytest.MonkeyPatch, name: str, command: str | None) -> bytes:
    """The trained policy after rl on the toy domain, played by the outside agent if there is one."""
    context = make_context("rl", name, rl=RL)
    if command is not None:
        path = context.root / "data/curated/toy/tasks.parquet"
        tasks = [Task(**{**vars(task), "prompt": "", "spec": {"input": {"room": task.seed}}}) for task in read_tasks(path)]
        write_tasks(path, tasks)
        made = SimpleNamespace(
            make=lambda folder: OutsideAgentEnvironment(command, 12, 60.0), settings=SimpleNamespace(max_turns=2)
        )
        monkeypatch.setattr(rl, "open_domain", lambda *_: made)
    rl.run(context)
    assert json.loads((context.root / "reports/rl/toy.json").read_text())["ledger/environment_tokens_trained"] == 0
    return (context.root / "data/models/rl/toy/model.safetensors").read_bytes()


@pytest.mark.slow
def test_rl_trains_through_a_program_to_the_bytes_of_the_domain_itself(make_context, monkeypatch, tmp_path: Path) -> None:
    """Contract: an agent written with the OpenAI client, in another process, is trained on exactly the tokens that it got: with
    the same messages and rewards as an environment of this project, rl ends in the same weights."""
    pytest.importorskip("openai", reason="needs the extra `openai`: pip install 'bellwether[openai]'")
    own = train(make_context, monkeypatch, "own", None)
    assert train(make_context, monkeypatch, "client", write_agent(tmp_path, OPENAI, TOY)) == own
    assert train(make_context, monkeypatch, "plain", write_agent(tmp_path, TOY)) == own
