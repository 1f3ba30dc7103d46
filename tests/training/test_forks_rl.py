"""rl on plays with several conversations: an outside agent that asks a sub-agent or rewrites its history."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from environments.agents import SHORTENED, SUB_AGENT, write_agent

from stages import rl
from stages.agent.active_episode import EpisodeRequest
from stages.agent.rollout import Labels, new_episode
from stages.engine.engine import Sampling
from stages.environments.outside_agent import OutsideAgentEnvironment
from stages.records.episode import Episode, Owner, joined, read_rows, read_tasks, write_tasks
from stages.records.task import Task
from stages.training.rl.forks import check_scored
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


def _episode(name: str, play: str = "") -> Episode:
    task = Task(task_id=name[0], domain="toy", prompt="", split="train", cluster="", seed=0, difficulty=1.0, spec={})
    episode = new_episode(EpisodeRequest(task, 0, task.task_id), Sampling(), Labels(0), "")
    episode.episode_id, episode.play = name, play
    return episode


def test_forks_without_their_play_and_scores_of_forks_are_refused() -> None:
    """Contract: a table that lacks a play's first conversation is named, and so is a fork that a scorer would take for a play."""
    lead, fork = _episode("a/0", play="a/0"), _episode("a/0/1", play="a/0")
    assert joined([fork, lead]) == [lead]
    with pytest.raises(ValueError, match="episode a/0/1 is a further conversation of a play"):
        check_scored([lead])
    check_scored([_episode("b/0")])
    with pytest.raises(ValueError, match="episode a/0/1 is of the play a/0, which the table lacks"):
        joined([fork])
