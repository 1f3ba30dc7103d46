"""What a search chose is played as an ordinary episode."""

from __future__ import annotations

from functools import partial

import pytest
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.policy import Policy
from stages.agent.recorded_engine import RecordedEngine
from stages.agent.rollout import Labels, attempts, collect
from stages.engine.engine import Sampling, Turn
from stages.engine.torch_engine import TorchEngine
from stages.evaluation.settings import TreeSearch
from stages.evaluation.tree_search import play_by_search


def test_what_is_played_is_the_episode_that_the_search_chose(policy: Policy, chat: Chat) -> None:
    """Contract: a record is token for token what the model sampled, with the environment's rewards and terms; tokens and
    environment steps of the search are counted beside it."""
    search = TreeSearch(iterations=6, sampling={"max_tokens": 4})
    requests = attempts(toy_tasks(5, turns=3), 2)
    limits = {"max_length": 200, "max_turns": None, "width": 8}
    found = []
    for slots in (4, 16):
        engine = TorchEngine(policy.model, [chat.end_of_turn], slots, 200)
        with EnvironmentPool(CountingEnvironment) as pool:
            found.append(play_by_search(engine, chat, pool, requests, search, Labels(3, "hash"), **limits))
        assert not engine._sessions
        sampled = sum(spent["tokens"] for spent in found[-1][1].values())
        own = sum(episode.policy_tokens for episode in found[-1][0])
        assert sampled + own == engine.counters["sampled_tokens"]
    assert found[0] == found[1]
    episodes, spent = found[0]
    assert [episode.episode_id for episode in episodes] == sorted(request.episode_id for request in requests) == sorted(spent)
    assert sum(episode.reward for episode in episodes) >= 9, "the hash of most actions is odd for one of a few"
    assert len({tuple(episode.token_ids) for episode in episodes}) == 10, "attempts differ"
    turns = {request.episode_id: request.task.spec["turns"] for request in requests}
    for episode in episodes:
        wanted = ("hash", turns[episode.episode_id], "terminated")
        assert (episode.policy_hash, len(episode.turns), episode.stop_reason) == wanted
        assert set(episode.reward_terms) == {"parity"}
        assert spent[episode.episode_id]["environment_steps"] >= 2 * len(episode.turns), "one simulated, one played"
        for turn in episode.turns:
            assert turn.action == chat.action_text(episode.token_ids[turn.start : turn.end])


def test_more_turns_than_recorded_are_an_error(chat: Chat) -> None:
    silent = RecordedEngine({})
    with (
        EnvironmentPool(CountingEnvironment) as pool,
        pytest.raises(ValueError, match="its environment does not repeat its answers"),
    ):
        collect(silent, chat, pool, attempts(toy_tasks(1), 1), Sampling(), Labels(0), max_length=200)


def test_a_recorded_engine_forgets_closed_sessions() -> None:
    engine = RecordedEngine({7: Turn(0, (1,), (0.0,), "stop")})
    first, second = engine.open([1]), engine.open([1])
    engine.request(second, 7, Sampling())
    engine.request(first, 7, Sampling())
    assert [turn.session for turn in engine.advance()] == [first, second]
    assert engine.advance() == []
    engine.close(first)
    for call in (partial(engine.extend, first, [1]), partial(engine.request, first, 7, Sampling()), partial(engine.close, first)):
        with pytest.raises(KeyError):
            call()
