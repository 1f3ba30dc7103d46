"""Best-of-n action selection: choice and ties, n = 1 as the plain policy, no dependence on other episodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.best_of_n import BestOfEngine, by_logprob, by_scorer, choose
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.policy import load_policy
from stages.agent.rollout import Labels, attempts, collect
from stages.engine.engine import Engine, Sampling, Turn
from stages.engine.torch_engine import TorchEngine
from stages.records.actions import action_key


def turn(tokens: tuple[int, ...], logprob: float) -> Turn:
    return Turn(0, tokens, (logprob,), "stop")


def fixed_scores(*scores: float) -> Any:
    """Ranks by these scores, one per distinct action."""

    def rank(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
        assert len(turns) == len(scores)
        return list(scores)

    return rank


def test_choose_takes_highest_score_then_logprob_then_first() -> None:
    turns = [turn((1,), -3.0), turn((2,), -1.0), turn((3,), -2.0)]
    assert choose((), turns, fixed_scores(0.1, 0.2, 0.7), str) == 2
    assert choose((), turns, fixed_scores(0.5, 0.5, 0.2), str) == 1
    assert choose((), [turn((1,), -1.0), turn((2,), -1.0)], fixed_scores(0.5, 0.5), str) == 0
    assert choose((), turns, by_logprob, str) == 1
    for constant in (-7.0, 0.0, 3.5):
        assert choose((), turns, fixed_scores(0.1 + constant, 0.2 + constant, 0.7 + constant), str) == 2


def test_choose_scores_equal_actions_once_and_avoids_empty_turns() -> None:
    """Contract: equal actions are scored once, as the first of them; a single distinct action is not scored."""
    turns = [turn((1, 9), -3.0), turn((2,), -1.0), turn((1,), -0.5)]
    first = lambda tokens: str(tokens[0])  # noqa: E731
    assert choose((), turns, fixed_scores(0.9, 0.1), first) == 0
    assert choose((), [turn((1, 9), -3.0), turn((1,), -0.5)], fixed_scores(), first) == 0
    assert choose((), [Turn(0, (), (), "context"), turn((1,), -0.5)], fixed_scores(), first) == 1
    assert choose((), [Turn(0, (), (), "context")] * 2, fixed_scores(), first) == 0


@pytest.mark.parametrize(("n", "expected"), [(1, 27 / 81), (2, 55 / 81), (3, None)])
def test_best_of_n_with_exact_q_improves_with_n(n: int, expected: float | None) -> None:
    """With the policy's exact Q, best-of-n is greedy policy improvement. Two turns with three actions each, drawn uniformly: the
    success rate over all enumerated draws equals the policy's at n = 1 and grows with n."""
    wins = {1: {3}, 2: {1, 2}, 3: set()}

    def chosen_with(q: dict[int, float]) -> dict[int, float]:
        """Action -> probability that it is the one chosen from n draws."""
        chosen = dict.fromkeys(q, 0.0)
        for draws in itertools.product(q, repeat=n):
            turns = [turn((action,), 0.0) for action in draws]
            index = choose((), turns, lambda history, some: [q[one.token_ids[0]] for one in some], str)
            chosen[draws[index]] += len(q) ** -n
        return chosen

    second = {first: chosen_with({action: float(action in won) for action in wins}) for first, won in wins.items()}
    first = chosen_with({action: len(won) / 3 for action, won in wins.items()})
    success = sum(first[one] * sum(second[one][action] for action in wins[one]) for one in wins)
    assert 1 / 3 <= success < 1
    assert success == pytest.approx(expected) if expected else success > 55 / 81


class TokenSumScorer:
    """Scores an action by the sum of its tokens, whatever the history."""

    def scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> torch.Tensor:
        assert len(history) > 0
        return torch.tensor([float(sum(action)) for action in actions])


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Any:
    return load_policy(tiny_policy)


def play(policy: Any, tasks: int, n: int | None, rank: Any = None, slots: int = 12, width: int = 8) -> tuple[list[Any], Engine]:
    chat = Chat(policy.tokenizer)
    engine: Engine = TorchEngine(policy.model, [chat.end_of_turn], slots, 160)
    if n is not None:
        engine = BestOfEngine(engine, n, rank or by_scorer(TokenSumScorer()), lambda tokens: action_key(chat.action_text(tokens)))
    with EnvironmentPool(CountingEnvironment) as pool:
        requests = attempts(toy_tasks(tasks), 2)
        return collect(engine, chat, pool, requests, Sampling(max_tokens=4), Labels(3), max_length=160, width=width), engine


def test_best_of_one_equals_plain_policy(policy: Any) -> None:
    """Contract: n = 1 gives the plain policy's episodes for the same seed, token for token."""
    plain, _ = play(policy, 4, None)
    assert play(policy, 4, 1)[0] == plain


def test_choices_do_not_depend_on_other_episodes_slots_or_width(policy: Any) -> None:
    whole, engine = play(policy, 4, 3)
    assert engine.counters["decisions"] == sum(len(episode.turns) for episode in whole)
    assert engine.counters["other_than_first"] > 0
    alone, _ = play(policy, 1, 3)
    assert alone == [episode for episode in whole if episode.task_id == "toy-000"]
    assert play(policy, 4, 3, slots=5, width=2)[0] == whole


def test_every_turn_has_highest_score_among_its_draws(policy: Any) -> None:
    """Contract: of the drawn actions the one with the highest score is played."""
    seen: dict[tuple[int, ...], list[list[Turn]]] = {}

    def rank(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
        seen.setdefault(tuple(history), []).append(list(turns))
        return [float(sum(one.token_ids)) for one in turns]

    episodes, _ = play(policy, 2, 4, rank)
    compared = 0
    for episode in episodes:
        for record in episode.turns:
            drawn = seen.get(tuple(episode.token_ids[: record.start]))
            if drawn is None:
                continue  # the draws were all the same action
            taken = tuple(episode.token_ids[record.start : record.end])
            offered = next(turns for turns in drawn if taken in [one.token_ids for one in turns])
            assert sum(taken) == max(sum(one.token_ids) for one in offered)
            compared += 1
    assert compared > 0


def test_best_of_engine_supports_fork_snapshot_and_close(policy: Any) -> None:
    engine = BestOfEngine(TorchEngine(policy.model, [3], 8, 64), 2, by_scorer(TokenSumScorer()), str)
    session = engine.open([5, 6, 7])
    (fork,) = engine.fork(session, 1)
    again = engine.open([8], engine.snapshot(session))
    engine.extend(fork, [8])
    for one in (again, fork):
        engine.request(one, 11, Sampling(max_tokens=3))
    turns: list[Turn] = []
    while len(turns) < 2:
        turns += engine.advance()
    assert {one.session for one in turns} == {again, fork}
    assert turns[0].token_ids == turns[1].token_ids, "equal tokens and key give equal draws"
    assert engine.advance() == []
    for one in (session, fork, again):
        engine.close(one)
    with pytest.raises(KeyError):
        engine.extend(session, [1])
    with pytest.raises(ValueError, match="at least 1"):
        BestOfEngine(engine, 0, by_logprob, str)
