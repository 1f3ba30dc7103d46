"""Rollouts: complete episodes that do not depend on what runs beside them."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from toy_environment import BrokenEnvironment, CountingEnvironment, ExitingEnvironment, toy_tasks

from stages.agent.environment_pool import EnvironmentPool
from stages.agent.logprobs import token_logprobs
from stages.agent.rollout import Labels, attempts, collect
from stages.engine.engine import Sampling, Turn
from stages.engine.torch_engine import TorchEngine
from stages.environments.registry import open_domain
from stages.records.episode import Owner, read_episodes, write_episodes

SAMPLING = Sampling(max_tokens=8)


def run(
    policy,
    chat,
    tasks,
    count=2,
    *,
    slots=16,
    width=16,
    max_length=200,
    make=CountingEnvironment,
    labels=None,
    processes=0,
    **kwargs,
):
    engine = TorchEngine(policy.model, [chat.end_of_turn], slots, max_length)
    labels = labels or Labels(3, policy.hash, "params")
    with EnvironmentPool(make, processes) as pool:
        requests = attempts(tasks, count)
        episodes = collect(engine, chat, pool, requests, SAMPLING, labels, max_length=max_length, width=width, **kwargs)
    assert not engine._sessions
    return episodes, engine


@pytest.fixture(scope="module")
def episodes(policy, chat):
    return run(policy, chat, toy_tasks(12), 3)[0]


def test_episodes_do_not_depend_on_width_threads_slots_or_other_tasks(policy, chat, episodes):
    """Contract: an episode is the same alone, with other tasks, widths, threads and fewer slots than episodes."""
    tasks = toy_tasks(12)
    assert run(policy, chat, tasks, 3, threaded=False, width=5)[0] == episodes
    assert run(policy, chat, tasks[::-1], 3, slots=6, width=40)[0] == episodes
    alone = run(policy, chat, tasks[7:8], 1)[0]
    assert alone == [episode for episode in episodes if episode.episode_id == alone[0].episode_id]


def test_episode_records_are_token_exact(policy, chat, episodes, tmp_path):
    """Contract: prompt, turns and observations follow each other without gaps, policy tokens have the log-probs that training
    computes, and the file round-trips."""
    for episode in episodes:
        assert len(episode.token_ids) == len(episode.owner) == len(episode.logprob) == len(episode.turn)
        opening = chat.prompt_tokens(episode.messages[0]["content"])
        assert episode.token_ids[: len(opening)] == opening
        place = len(opening)
        for index, turn in enumerate(episode.turns):
            assert turn.start == place
            ids = episode.token_ids[turn.start : turn.end]
            assert set(episode.owner[turn.start : turn.end]) == {int(Owner.POLICY)}
            assert turn.action == chat.action_text(ids)
            assert turn.action_key == " ".join(turn.action.lower().split())
            assert turn.state_key == "|".join(earlier.action for earlier in episode.turns[:index])
            place = turn.end
            if index + 1 < len(episode.turns):
                answer = [*chat.closing_tokens(ids), *chat.observation_tokens(turn.observation)]
                assert episode.token_ids[place : place + len(answer)] == answer
                assert set(episode.owner[place : place + len(answer)]) == {int(Owner.ENVIRONMENT)}
                place += len(answer)
            assert set(episode.turn[turn.start : place]) == {index}
        assert place == len(episode.token_ids)
        assert episode.turn.count(-1) == len(opening) == episode.owner.count(0)
        mask = torch.tensor([episode.owner]) == int(Owner.POLICY)
        with torch.no_grad():
            trained = token_logprobs(policy.model, torch.tensor([episode.token_ids]), mask)
        torch.testing.assert_close(trained[0], torch.tensor(episode.logprob), atol=1e-5, rtol=0)
        assert episode.reward == sum(turn.reward for turn in episode.turns)
        assert episode.terminated
        assert episode.stop_reason == "terminated"
        assert [message["role"] for message in episode.messages[::2]] == ["user"] * len(episode.messages[::2])
    assert [episode.episode_id for episode in episodes] == sorted(episode.episode_id for episode in episodes)
    assert len({tuple(episode.token_ids) for episode in episodes}) > 24
    write_episodes(tmp_path / "episodes.parquet", episodes)
    assert [episode.token_ids for episode in read_episodes(tmp_path / "episodes.parquet")] == [
        episode.token_ids for episode in episodes
    ]


class ScriptedEngine:
    """An engine that returns given texts in order."""

    def __init__(self, texts, chat):
        self.turns = [chat.assistant_tokens(text) for text in texts]
        self.asked, self.opened = [], 0

    def open(self, token_ids, prefix=None):
        self.opened += 1
        return self.opened

    def extend(self, session, token_ids): ...

    def request(self, session, key, sampling):
        self.asked.append(session)

    def advance(self):
        asked, self.asked = self.asked, []
        return [Turn(session, tuple(ids := self.turns.pop(0)), (0.0,) * len(ids), "stop") for session in asked]

    def fork(self, session, count):
        return [self.open(()) for _ in range(count)]

    def snapshot(self, session): ...

    def close(self, session): ...


def test_demonstration_has_the_same_tokens_as_its_episode(chat):
    """Contract: SFT on an episode's messages uses exactly its tokens, owners and turns."""
    engine = ScriptedEngine(["open box", "take key", "go north"], chat)
    with EnvironmentPool(CountingEnvironment) as pool:
        requests = attempts(toy_tasks(3)[2:], 1)
        (episode,) = collect(engine, chat, pool, requests, SAMPLING, Labels(0), max_length=200)
    assert [turn.action for turn in episode.turns] == ["open box", "take key", "go north"]
    encoded = chat.encode_demonstration(episode.messages)
    assert (encoded.token_ids, encoded.owner, encoded.turn) == (episode.token_ids, episode.owner, episode.turn)
    assert encoded.spans == [(turn.start, turn.end) for turn in episode.turns]


def test_prompt_is_prefilled_once_for_all_attempts(policy, chat):
    tasks = toy_tasks(2, turns=1)
    _, engine = run(policy, chat, tasks, 8)
    prompts = sum(len(chat.prompt_tokens(f"take the key\nyou are in room {task.seed}")) for task in tasks)
    # Each attempt feeds the prompt's last token again, whose hidden state its first draw needs.
    assert engine.counters["fed_tokens"] == prompts - len(tasks) + 16


def test_episode_out_of_tokens_is_truncated(policy, chat):
    """Contract: no token beyond max_length; episodes that reach it are truncated, not terminated."""
    found = set()
    for max_length in (13, 16, 22, 30, 40):
        episodes, _ = run(policy, chat, toy_tasks(6, turns=6), max_length=max_length)
        for episode in episodes:
            assert len(episode.token_ids) <= max(max_length, 13)
            assert episode.truncated == (episode.stop_reason != "terminated")
            assert episode.terminated != episode.truncated
            found.add(episode.stop_reason)
    assert found == {"terminated", "context", "length"}


def test_turn_limit_truncates_episode(policy, chat):
    episodes, _ = run(policy, chat, toy_tasks(3, turns=2, ends=False))
    assert {episode.stop_reason for episode in episodes} == {"turn_limit"}
    assert all(episode.truncated and not episode.terminated for episode in episodes)


def test_draws_depend_on_seed_stream_and_attempt(policy, chat):
    tasks = toy_tasks(1)
    base = run(policy, chat, tasks, 2)[0]
    assert base[0].token_ids != base[1].token_ids
    assert run(policy, chat, tasks, 1, labels=Labels(4))[0][0].token_ids != base[0].token_ids
    assert run(policy, chat, tasks, 1, labels=Labels(3, stream="evaluate"))[0][0].token_ids != base[0].token_ids


def test_nondeterministic_reset_raises(policy, chat):
    class Nondeterministic(CountingEnvironment):
        starts = 0

        def reset(self, task):
            Nondeterministic.starts += 1
            observation = super().reset(task)
            return type(observation)(f"{observation.text} {Nondeterministic.starts}")

    with pytest.raises(RuntimeError, match="toy-000 has different first observations"):
        run(policy, chat, toy_tasks(1), 2, make=Nondeterministic)


def test_environment_processes_give_the_same_episodes(policy, chat, episodes):
    """Environments in two processes, as while a GPU generates; their errors propagate, and a process that exits is reported."""
    before = CountingEnvironment.instances
    assert run(policy, chat, toy_tasks(12), 3, processes=2)[0] == episodes
    assert CountingEnvironment.instances == before
    with pytest.raises(OSError, match="the game crashed"):
        run(policy, chat, toy_tasks(3), make=BrokenEnvironment, processes=1)
    with pytest.raises(OSError, match=r"process of environments has ended \(exit code 3\)"):
        run(policy, chat, toy_tasks(3), make=ExitingEnvironment, processes=1)


@pytest.mark.parametrize("name", ["search", "textworld", "wordle", "keydoor", "shop", "code", "factbook"])
def test_shipped_domains_can_be_pickled(name):
    """As rl sends them to processes of environments: after they are ready, when the sandbox, say, is known."""
    domain = open_domain(name, {})
    assert type(pickle.loads(pickle.dumps(partial(domain.make, Path("worlds")))).func.__self__) is type(domain)


@pytest.mark.parametrize("threaded", [True, False])
def test_environment_error_propagates(policy, chat, threaded):
    with pytest.raises(OSError, match="the game crashed"):
        run(policy, chat, toy_tasks(3), make=BrokenEnvironment, threaded=threaded)


def test_environments_are_reused(policy, chat):
    before = CountingEnvironment.instances
    run(policy, chat, toy_tasks(12), 2, width=4)
    assert CountingEnvironment.instances - before == 4


def test_on_episode_is_called_once_and_duplicate_requests_raise(policy, chat):
    reported = []
    episodes, _ = run(policy, chat, toy_tasks(4), on_episode=lambda episode: reported.append(episode.episode_id))
    assert sorted(reported) == [episode.episode_id for episode in episodes]
    with pytest.raises(ValueError, match="same task and attempt"):
        run(policy, chat, toy_tasks(1) * 2)
