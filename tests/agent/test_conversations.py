"""Plays with several conversations: each is an episode that the policy drew token by token, with the play's outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from environments.agents import FEW_SHOT, SHORTENED, SUB_AGENT, write_agent

from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.logprobs import token_logprobs
from stages.agent.policy import Policy
from stages.agent.rollout import Labels, attempts, collect
from stages.algorithms.parts.branching import Branching, EntropyPlan
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine
from stages.environments.outside_agent import OutsideAgentEnvironment
from stages.records.episode import Episode, Owner, conversations, read_episodes, read_rows, write_episodes
from stages.records.task import Task

SAMPLING = Sampling(max_tokens=4)
POLICY, PROMPT, ENVIRONMENT = int(Owner.POLICY), int(Owner.PROMPT), int(Owner.ENVIRONMENT)


def play(policy: Policy, chat: Chat, folder: Path, program: str, count: int = 3, **limits: Any) -> list[Episode]:
    """Episodes of a program on `count` tasks."""
    engine = TorchEngine(policy.model, [chat.end_of_turn], 8, 128)
    command = write_agent(folder, program)
    tasks = [Task(f"t{number}", "outside_agent", "train", 0, "", {"input": {"room": number}}, 0.0) for number in range(count)]
    given = {"max_length": 128, "width": 8, **limits}
    with EnvironmentPool(lambda: OutsideAgentEnvironment(command, 12, 60.0)) as pool:
        episodes = collect(engine, chat, pool, attempts(tasks, 1), SAMPLING, Labels(3, policy.hash, "params"), **given)
    assert not engine._sessions
    return episodes


def test_conversations_are_token_exact_and_share_the_outcome(policy: Policy, chat: Chat, tmp_path: Path) -> None:
    """Contract: each conversation has the tokens that the policy read and drew there, with the log-probabilities that training
    computes; the first one goes on after the others; all have the play's return, terms and end."""
    episodes = play(policy, chat, tmp_path, SUB_AGENT)
    assert [episode.episode_id for episode in episodes] == ["t0/0000", "t1/0000", "t2/0000"]
    for number, episode in enumerate(episodes):
        (fork,) = episode.forks
        assert (fork.episode_id, fork.play, episode.play) == (f"t{number}/0000/1", episode.episode_id, episode.episode_id)
        assert (fork.task_id, fork.group_id, fork.policy_hash) == (episode.task_id, episode.group_id, policy.hash)
        assert (episode.moves, fork.moves) == ([0, 3], [1, 2])
        assert (fork.reward, fork.reward_terms, fork.stop_reason) == (episode.reward, episode.reward_terms, "terminated")
        assert [sum(turn.reward for turn in one.turns) for one in (episode, fork)] == [episode.reward] * 2
        for one, texts in (
            (episode, [f"you are in room {number}", "you see a key"]),
            (fork, ["what is a key", "are you sure"]),
        ):
            first, second = one.turns
            opening = chat.prompt_tokens(texts[0])
            answer = [*chat.closing_tokens(one.token_ids[first.start : first.end]), *chat.observation_tokens(texts[1])]
            assert one.token_ids[: first.start] == opening
            assert one.token_ids[first.end : second.start] == answer
            assert second.end == len(one.token_ids) == len(one.logprob)
            owners = [PROMPT] * len(opening) + [POLICY] * (first.end - first.start) + [ENVIRONMENT] * len(answer)
            assert one.owner == owners + [POLICY] * (second.end - second.start)
            assert one.turn[second.start :] == [1] * (second.end - second.start)
            assert [message["content"] for message in one.messages] == [texts[0], first.action, texts[1], second.action]
            assert [first.observation, second.observation] == [texts[1], ""]
            ids, mask = torch.tensor([one.token_ids]), torch.tensor([[owner == POLICY for owner in one.owner]])
            expected = token_logprobs(policy.model, ids, mask)[0]
            assert torch.allclose(torch.tensor(one.logprob), expected, atol=1e-5)
    write_episodes(tmp_path / "episodes.parquet", conversations(episodes))
    stored = read_episodes(tmp_path / "episodes.parquet")
    assert [(one.episode_id, one.play, one.moves) for one in stored[:2]] == [
        ("t0/0000", "t0/0000", [0, 3]),
        ("t0/0000/1", "t0/0000", [1, 2]),
    ]
    assert "forks" not in read_rows(tmp_path / "episodes.parquet")[0]


def test_a_shortened_history_is_a_prompt(policy: Policy, chat: Chat, tmp_path: Path) -> None:
    """Contract: turns that a rewritten history repeats are trained where they were drawn, not again."""
    for number, episode in enumerate(play(policy, chat, tmp_path, SHORTENED)):
        (fork,) = episode.forks
        assert (len(episode.turns), len(fork.turns), episode.moves, fork.moves) == (2, 1, [0, 1], [2])
        kept = [
            {"role": "user", "content": f"you are in room {number}"},
            {"role": "assistant", "content": episode.turns[1].action},
        ]
        prompt = chat.encode([*kept, {"role": "user", "content": "you see a door"}]).token_ids
        assert fork.token_ids[: fork.turns[0].start] == prompt
        assert fork.owner[: len(prompt)] == [PROMPT] * len(prompt)
        assert set(fork.owner[len(prompt) :]) == {POLICY}
        assert (fork.reward, fork.success) == (episode.reward, episode.success)


def test_examples_are_the_prompt(policy: Policy, chat: Chat, tmp_path: Path) -> None:
    for number, episode in enumerate(play(policy, chat, tmp_path, FEW_SHOT)):
        asked = [("user", "one"), ("assistant", "a"), ("user", f"you are in room {number}")]
        prompt = chat.encode([{"role": role, "content": text} for role, text in asked]).token_ids
        assert episode.token_ids[: episode.turns[0].start] == prompt
        assert set(episode.owner[: len(prompt)]) == {PROMPT}
        assert (episode.forks, episode.play, len(episode.turns)) == ([], "", 1)


def test_limits_are_the_plays(policy: Policy, chat: Chat, tmp_path: Path) -> None:
    """Contract: turns are counted over all conversations; one without room for a turn ends the play and leaves no episode."""
    for episode in play(policy, chat, tmp_path, SUB_AGENT, max_turns=2):
        assert [(one.stop_reason, one.truncated, len(one.turns)) for one in conversations([episode])] == [
            ("turn_limit", True, 1)
        ] * 2
    long = SUB_AGENT.replace("what is a key", "what is a key " * 60)
    for episode in play(policy, chat, tmp_path, long):
        assert (episode.stop_reason, episode.reward, episode.forks, len(episode.turns)) == ("context", 0.0, [], 1)


def test_plays_do_not_depend_on_what_runs_beside_them(policy: Policy, chat: Chat, tmp_path: Path) -> None:
    together = play(policy, chat, tmp_path, SUB_AGENT, 4)
    assert play(policy, chat, tmp_path, SUB_AGENT, 4, width=1, threaded=False) == together


@pytest.mark.parametrize("program", [SUB_AGENT, FEW_SHOT])
def test_groups_that_branch_have_one_conversation(policy: Policy, chat: Chat, tmp_path: Path, program: str) -> None:
    """Contract: where episodes branch within a play, a request of another conversation ends the episode, as its term says."""
    command = write_agent(tmp_path, program)
    engine = TorchEngine(policy.model, [chat.end_of_turn], 8, 128)
    task = Task("t0", "outside_agent", "train", 0, "", {"input": {"room": 0}}, 0.0)
    plan = EntropyPlan(Branching(kind="entropy", initial=1, tokens=2), policy.model.config.vocab_size)
    with EnvironmentPool(lambda: OutsideAgentEnvironment(command, 12, 60.0)) as pool:
        parts = (engine, chat, pool, attempts([task], 2), SAMPLING, Labels(3, policy.hash, "params"))
        episodes = collect(*parts, max_length=128, width=8, plan=plan)
    expected = [{"other_conversation": 1.0}] if program == SUB_AGENT else [{"letter": 0.0}, {"letter": 1.0}]
    assert len(episodes) == 2
    assert all(episode.reward_terms in expected and not episode.forks for episode in episodes)
