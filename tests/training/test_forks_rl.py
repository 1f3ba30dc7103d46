"""rl on plays with several conversations: an outside agent that asks a sub-agent or rewrites its history."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from environments.agents import SHORTENED, SUB_AGENT, write_agent

from stages import rl
from stages.environments.outside_agent import OutsideAgentEnvironment
from stages.records.episode import Owner, read_rows, read_tasks, write_tasks
from stages.records.task import Task
from training.toys import SHORT_RUN, run


@pytest.mark.parametrize("program", [SUB_AGENT, SHORTENED])
def test_all_conversations_are_trained_with_the_plays_advantage(make_context, monkeypatch, tmp_path: Path, program: str) -> None:
    """Contract: importance ratios of every conversation start at 1 on policy (the loop asserts that its log-probabilities are
    those of training), each policy token is trained once and no other, conversations have their play's advantage, and numbers of
    the history are about plays."""
    context = make_context("rl", "forks", rl={**SHORT_RUN, "steps": 2, "algorithm": "grpo", "dead_groups": "keep"})
    path = context.root / "data/curated/toy/tasks.parquet"
    tasks = [Task(**{**vars(task), "prompt": "", "spec": {"input": {"room": task.seed}}}) for task in read_tasks(path)]
    write_tasks(path, tasks)
    command = write_agent(tmp_path, program)
    made = SimpleNamespace(make=lambda _: OutsideAgentEnvironment(command, 12, 60.0), settings=SimpleNamespace(max_turns=8))
    monkeypatch.setattr(rl, "open_domain", lambda *_: made)
    history = run(context)
    assert [row["forks"] for row in history] == [12.0, 12.0]
    assert [row["episodes"] for row in history] == [12.0, 12.0]
    turns = 4 if program == SUB_AGENT else 3
    assert [row["environment_steps"] for row in history] == [12.0 * turns] * 2
    assert all(row["ratio_max"] == pytest.approx(1.0, abs=1e-4) for row in history)

    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["max_logprob_difference"] <= 1e-5
    assert report["ledger/environment_tokens_trained"] == 0
    rows = [row for row in read_rows(context.root / "data/rl/toy/samples.parquet") if row["step"] == 1]
    plays = {row["play"]: row for row in rows if row["episode_id"] == row["play"]}
    assert (len(rows), len(plays)) == (24, 12)
    assert any(row["reward"] == 1.0 for row in rows)
    for row in rows:
        lead = plays[row["play"]]
        assert (row["reward"], row["reward_terms"]) == (lead["reward"], lead["reward_terms"])
        own, its = (
            [value for value, owner in zip(one["advantages"], one["owner"], strict=True) if owner == Owner.POLICY]
            for one in (row, lead)
        )
        assert set(own) == set(its)
        assert all(value == 0 for value, owner in zip(row["advantages"], row["owner"], strict=True) if owner != Owner.POLICY)
    group = [row for row in plays.values() if row["group_id"] == rows[0]["group_id"]]
    mean = sum(row["reward"] for row in group) / len(group)
    assert len(group) == 4
    for row in group:
        value = next(value for value, owner in zip(row["advantages"], row["owner"], strict=True) if owner == Owner.POLICY)
        assert (value > 0) == (row["reward"] > mean)
    written = read_rows(context.root / "data/rl/toy/samples.parquet", ["owner"])
    assert report["ledger/policy_tokens_trained"] == sum(row["owner"].count(int(Owner.POLICY)) for row in written)
