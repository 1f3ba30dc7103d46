"""Recordings of an outside agent's calls, and the episodes that they become."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.agent.policy import policy_hash
from stages.engine.engine import Sampling, Turn
from stages.records.episode import Episode, Owner, conversations, joined, read_episodes
from stages.serving import __main__ as serve
from stages.serving.app import Agent, RefusedError
from stages.serving.episodes import episodes_of, main
from stages.serving.recording import Call, Recording, Trace, read_recording
from stages.serving.schemas import OutcomeReport
from stages.serving.variants import PLAIN, Variant

POLICY, PROMPT, ENVIRONMENT = int(Owner.POLICY), int(Owner.PROMPT), int(Owner.ENVIRONMENT)


def call(prompt_ids: list[int], token_ids: list[int], policy: str = "p", temperature: float = 1.0, top_p: float = 1.0) -> Call:
    """A call whose texts are its tokens, with the log-probability -token / 10 for each."""
    logprobs = tuple(-token / 10 for token in token_ids)
    texts = (f"q{len(prompt_ids)}", " ".join(map(str, token_ids)))
    return Call(policy, temperature, top_p, 0, tuple(prompt_ids), tuple(token_ids), logprobs, *texts)


def only(traces: list[Trace]) -> Episode:
    (episode,), left = episodes_of(traces, "outside_agent")
    assert not left
    return episode


def test_calls_that_go_on_are_one_episode() -> None:
    """Contract: what the policy drew keeps its tokens and log-probabilities; what a prompt adds is the environment's."""
    calls = [call([1, 2, 3], [7, 8]), call([1, 2, 3, 7, 8, 4, 5], [9])]
    episode = only([Trace("a", "t", calls, 0.5)])
    assert (episode.episode_id, episode.task_id, episode.group_id, episode.policy_hash) == ("t/0000", "t", "t", "p")
    assert episode.token_ids == [1, 2, 3, 7, 8, 4, 5, 9]
    assert episode.owner == [PROMPT] * 3 + [POLICY] * 2 + [ENVIRONMENT] * 2 + [POLICY]
    assert episode.logprob == [0, 0, 0, -0.7, -0.8, 0, 0, -0.9]
    assert episode.turn == [-1, -1, -1, 0, 0, 0, 0, 1]
    assert [(turn.action, turn.observation, turn.start, turn.end, turn.reward) for turn in episode.turns] == [
        ("7 8", "q7", 3, 5, 0.0),
        ("9", "", 7, 8, 0.5),
    ]
    assert (episode.reward, episode.success, episode.terminated, episode.play, episode.forks) == (0.5, False, True, "", [])
    assert [message["content"] for message in episode.messages] == ["q3", "7 8", "q7", "9"]


def test_a_prefix_that_breaks_begins_a_conversation() -> None:
    """Contract: a sub-agent's call, a rewritten history and a text with other tokens than the drawn begin a conversation whose
    prompt is all that they show; the first goes on after them; all have the trace's reward."""
    calls = [
        call([1, 2, 3], [7, 8]),
        call([1, 20], [5]),  # a sub-agent
        call([1, 2, 3, 7, 8, 4], [9]),  # the first conversation
        call([1, 20, 5, 6], [6]),  # the sub-agent's
        call([1, 2, 4, 9, 3], [2]),  # a history without its first turn
        call([1, 20, 5, 6, 66, 4], [3]),  # other tokens in place of the drawn 6
    ]
    episode = only([Trace("a", "t", calls, 1.0)])
    assert [one.episode_id for one in conversations([episode])] == ["t/0000", "t/0000/1", "t/0000/2", "t/0000/3"]
    assert [one.moves for one in conversations([episode])] == [[0, 2], [1, 3], [4], [5]]
    sub, rewritten, retokenised = episode.forks
    assert episode.token_ids == [1, 2, 3, 7, 8, 4, 9]
    assert (sub.token_ids, sub.owner) == ([1, 20, 5, 6, 6], [PROMPT, PROMPT, POLICY, ENVIRONMENT, POLICY])
    assert (rewritten.token_ids, rewritten.owner) == ([1, 2, 4, 9, 3, 2], [PROMPT] * 5 + [POLICY])
    assert (retokenised.token_ids, retokenised.owner) == ([1, 20, 5, 6, 66, 4, 3], [PROMPT] * 6 + [POLICY])
    for one in conversations([episode]):
        assert (one.reward, one.success, one.play, one.turns[-1].reward) == (1.0, True, "t/0000", 1.0)
        assert sum(turn.reward for turn in one.turns) == 1.0
    trained = sum(owner == POLICY for one in conversations([episode]) for owner in one.owner)
    assert trained == sum(len(one.token_ids) for one in calls)


def test_a_repeated_request_is_another_conversation() -> None:
    """Contract: of two answers to the same prompt, the one that a later prompt repeats goes on."""
    first, second, later = call([1, 2], [7]), call([1, 2], [8]), call([1, 2, 7, 3], [9])
    episode = only([Trace("a", "t", [first, second, later], 0.0)])
    assert (episode.token_ids, [fork.token_ids for fork in episode.forks]) == ([1, 2, 7, 3, 9], [[1, 2, 8]])


def test_traces_that_can_not_be_trained_on_are_counted() -> None:
    good = call([1], [7])
    traces = [
        Trace("a", "t", [good], 1.0),
        Trace("b", "t", [good]),
        Trace("c", "t", [good, call([1, 7, 2], [3], policy="other")], 1.0),
        Trace("d", "t", [call([1], [7], temperature=0.0)], 1.0),
        Trace("e", "t", [call([1], [7], top_p=0.9)], 1.0),
        Trace("f", "t", [call([1], [])], 1.0),
        Trace("g", "t", [], 1.0),
        Trace("h", "t", [good], 0.0),
    ]
    found, left = episodes_of(traces, "outside_agent")
    assert [(episode.episode_id, episode.reward) for episode in found] == [("t/0000", 1.0), ("t/0001", 0.0)]
    assert left == {"unrewarded": 1, "mixed_sampling": 1, "greedy": 1, "top_k_or_top_p": 1, "without_answers": 2}


def test_traces_without_a_task_are_grouped_by_their_first_prompt() -> None:
    traces = [Trace(name, "", [call(prompt, [7])], 1.0) for name, prompt in (("a", [1, 2]), ("b", [1, 3]), ("c", [1, 2]))]
    found, _ = episodes_of(traces, "outside_agent")
    groups = [episode.group_id for episode in found]
    assert sorted(groups.count(name) for name in set(groups)) == [1, 2]
    assert all(name.startswith("prompt-") for name in groups)


def turn(token_ids: list[int]) -> Turn:
    return Turn(0, tuple(token_ids), tuple(-0.1 for _ in token_ids), "stop")


def test_a_recording_becomes_a_table(tmp_path: Path, tiny_policy: Path, capsys: pytest.CaptureFixture) -> None:
    """Contract: the file is its owner's alone and can be continued; the table has what was drawn; another policy is refused by
    name."""
    path, out = tmp_path / "serving/recorded.jsonl", tmp_path / "raw/mine.parquet"
    own = policy_hash(tiny_policy)
    recording = Recording(path, own)
    assert path.stat().st_mode & 0o077 == 0
    recording.calls("r1", "t", Sampling(), [1, 2], "hello", [("a b", turn([7, 8]))])
    recording.outcome("r1", 0.25, None)
    recording = Recording(path, own)
    recording.calls("r2", "t", Sampling(), [1, 2], "hello", [("c", turn([9]))])
    recording.calls("r2", "t", Sampling(), [1, 2, 9, 3], "and then", [("d", turn([6])), ("e", turn([5]))])
    recording.outcome("r2", 0.0, None)
    recording.outcome("r2", 0.5, True)
    recording.calls("r3", "t", Sampling(), [1, 2], "hello", [("c", turn([9]))])
    arguments = [str(path), "--out", str(out), "--policy", str(tiny_policy)]
    assert main(arguments) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts == {"plays": 2, "conversations": 3, "tasks": 1, "mean_reward": 0.375, "left_out": {"unrewarded": 1}}
    first, second = joined(read_episodes(out))
    assert (first.token_ids, first.reward, first.success, first.forks) == ([1, 2, 7, 8], 0.25, False, [])
    assert (second.token_ids, second.reward, second.success) == ([1, 2, 9, 3, 6], 0.5, True)
    assert [fork.token_ids for fork in second.forks] == [[1, 2, 9, 3, 5]]

    other = Recording(tmp_path / "other.jsonl", "0123456789abcdef")
    other.calls("r1", "t", Sampling(), [1, 2], "hello", [("a", turn([7]))])
    other.outcome("r1", 1.0, None)
    assert main([str(other.path), *arguments[1:]]) == 2
    message = capsys.readouterr().err
    assert f"traces of other policies than {tiny_policy} ({own}): 1 of policy 0123456789abcdef" in message


def test_files_that_are_no_recording_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text('{"version": 1, "trace": "a", "reward": 1.0, "success": null}\n{"version": 2, "trace": "a"}\n')
    with pytest.raises(ValueError, match=r"calls\.jsonl:2 is not a row of a recording .*version 2"):
        Recording(path, "p")
    path.write_text('{"version": 1, "trace": "a", "reward": 1.0, "success": null}\n')
    assert [trace.reward for trace in read_recording(path)] == [1.0]
    assert main([str(path), "--out", str(tmp_path / "out.parquet")]) == 2
    assert "has no trace that can be trained on; left out: {'without_answers': 1}" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "--out", "x"]) == 2


def test_outcomes_have_a_reward() -> None:
    """Contract: a report of success alone is a reward of 1 or 0; a reward alone is a success if it is 1."""
    found = [
        OutcomeReport(trace="a", **given) for given in ({"success": True}, {"success": False}, {"reward": 1.0}, {"reward": 0.5})
    ]
    assert [(one.earned, one.solved) for one in found] == [(1.0, True), (0.0, False), (1.0, True), (0.5, False)]
    assert (both := OutcomeReport(trace="a", success=True, reward=0.5)).solved
    assert both.earned == 0.5
    for wrong in ({}, {"reward": 1.5}, {"reward": float("nan")}):
        with pytest.raises(ValueError, match=r"give success|less than or equal to 1|finite"):
            OutcomeReport(trace="a", **wrong)


def test_answers_chosen_among_several_draws_are_not_recorded(tmp_path: Path) -> None:
    """Contract: a recorded token's log-probability is the one that it was drawn with."""
    names = {"sft": PLAIN, "sft+vote": Variant(3, lambda: None)}
    agent: Any = SimpleNamespace(names=names, recording=Recording(tmp_path / "a.jsonl", "p"))
    Agent.check_recorded(agent, "sft")
    with pytest.raises(RefusedError, match=r"recorded for training here, and sft\+vote chooses them among several draws"):
        Agent.check_recorded(agent, "sft+vote")
    agent.recording = None
    Agent.check_recorded(agent, "sft+vote")


def test_other_models_answers_can_not_be_recorded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "--record", "a.jsonl", "--router", "data/conversion"])
    with pytest.raises(SystemExit):
        serve.main()
    assert "--record is for the policy's own answers" in capsys.readouterr().err


def test_full_disk_leaves_no_part_of_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    recording = Recording(path, "p")
    recording.outcome("a", 1.0, None)
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(OSError, match=r"No space left|File too large"):
            recording.outcome("b", 1.0, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    recording.outcome("c", 0.0, None)
    assert [trace.name for trace in read_recording(path)] == ["a", "c"]
