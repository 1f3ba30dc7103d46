"""Best of n actions: what is chosen, that one draw changes nothing, and that neighbours have no say."""

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
from stages.agent.rollout import Labels, action_key, attempts, collect
from stages.engine.engine import Engine, Sampling, Turn
from stages.engine.torch_engine import TorchEngine


def turn(tokens: tuple[int, ...], logprob: float) -> Turn:
    return Turn(0, tokens, (logprob,), "stop")


def fixed(*scores: float) -> Any:
    """Ranks by a list, which must be as long as the different actions."""

    def rank(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
        assert len(turns) == len(scores)
        return list(scores)

    return rank


def test_the_best_is_taken_and_ties_go_to_the_likelier_then_to_the_first() -> None:
    turns = [turn((1,), -3.0), turn((2,), -1.0), turn((3,), -2.0)]
    assert choose((), turns, fixed(0.1, 0.2, 0.7), str) == 2
    assert choose((), turns, fixed(0.5, 0.5, 0.2), str) == 1
    assert choose((), [turn((1,), -1.0), turn((2,), -1.0)], fixed(0.5, 0.5), str) == 0
    assert choose((), turns, by_logprob, str) == 1
    for constant in (-7.0, 0.0, 3.5):
        assert choose((), turns, fixed(0.1 + constant, 0.2 + constant, 0.7 + constant), str) == 2


def test_equal_actions_are_one_and_a_turn_without_room_is_the_last_resort() -> None:
    """Contract: draws of one action are scored once, as the first of them; if all are the same nothing is scored."""
    turns = [turn((1, 9), -3.0), turn((2,), -1.0), turn((1,), -0.5)]
    first = lambda tokens: str(tokens[0])  # noqa: E731
    assert choose((), turns, fixed(0.9, 0.1), first) == 0
    assert choose((), [turn((1, 9), -3.0), turn((1,), -0.5)], fixed(), first) == 0
    assert choose((), [Turn(0, (), (), "context"), turn((1,), -0.5)], fixed(), first) == 1
    assert choose((), [Turn(0, (), (), "context")] * 2, fixed(), first) == 0


@pytest.mark.parametrize(("n", "expected"), [(1, 27 / 81), (2, 55 / 81), (3, None)])
def test_an_oracle_makes_the_policy_better_the_more_it_draws(n: int, expected: float | None) -> None:
    """Limit of step_q: with exact Q of the policy, choosing is greedy improvement. A game of two turns with three actions each,
    drawn uniformly: success by enumeration of all draws is the policy's own at n = 1, and grows with n towards the best."""
    wins = {1: {3}, 2: {1, 2}, 3: set()}

    def played(q: dict[int, float]) -> dict[int, float]:
        """Action -> how often it is the one of n draws that is taken."""
        taken = dict.fromkeys(q, 0.0)
        for draws in itertools.product(q, repeat=n):
            turns = [turn((action,), 0.0) for action in draws]
            place = choose((), turns, lambda history, some: [q[one.token_ids[0]] for one in some], str)
            taken[draws[place]] += len(q) ** -n
        return taken

    second = {first: played({action: float(action in won) for action in wins}) for first, won in wins.items()}
    first = played({action: len(won) / 3 for action, won in wins.items()})
    success = sum(first[one] * sum(second[one][action] for action in wins[one]) for one in wins)
    assert 1 / 3 <= success < 1
    assert success == pytest.approx(expected) if expected else success > 55 / 81


class Preferring:
    """Prefers actions whose tokens have the largest sum, the same for any history."""

    def scores(self, history: Sequence[int], actions: Sequence[Sequence[int]]) -> torch.Tensor:
        assert len(history) > 0
        return torch.tensor([float(sum(action)) for action in actions])


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Any:
    return load_policy(tiny_policy)


def played(policy: Any, tasks: int, n: int | None, rank: Any = None, slots: int = 12, width: int = 8) -> tuple[list[Any], Engine]:
    chat = Chat(policy.tokenizer)
    engine: Engine = TorchEngine(policy.model, [chat.end_of_turn], slots, 160)
    if n is not None:
        engine = BestOfEngine(engine, n, rank or by_scorer(Preferring()), lambda tokens: action_key(chat.action_text(tokens)))
    with EnvironmentPool(CountingEnvironment) as pool:
        requests = attempts(toy_tasks(tasks), 2)
        return collect(engine, chat, pool, requests, Sampling(max_tokens=4), Labels(3), max_length=160, width=width), engine


def test_one_draw_is_the_policy_itself(policy: Any) -> None:
    """Contract: n = 1 gives the actor's own episodes under the same seed, token for token."""
    plain, _ = played(policy, 4, None)
    assert played(policy, 4, 1)[0] == plain


def test_choices_do_not_depend_on_neighbours_slots_or_width(policy: Any) -> None:
    whole, engine = played(policy, 4, 3)
    assert engine.counters["decisions"] == sum(len(episode.turns) for episode in whole)
    assert engine.counters["other_than_first"] > 0
    alone, _ = played(policy, 1, 3)
    assert alone == [episode for episode in whole if episode.task_id == "toy-000"]
    assert played(policy, 4, 3, slots=5, width=2)[0] == whole


def test_every_turn_is_the_best_of_its_draws(policy: Any) -> None:
    """Contract: whatever was drawn, the one with the highest score was played, and its log-probabilities are the policy's."""
    seen: dict[tuple[int, ...], list[list[Turn]]] = {}

    def rank(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
        seen.setdefault(tuple(history), []).append(list(turns))
        return [float(sum(one.token_ids)) for one in turns]

    episodes, _ = played(policy, 2, 4, rank)
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


def test_sessions_branch_and_close_as_in_any_engine(policy: Any) -> None:
    engine = BestOfEngine(TorchEngine(policy.model, [3], 8, 64), 2, by_scorer(Preferring()), str)
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
    assert turns[0].token_ids == turns[1].token_ids, "the same tokens and key, the same draws"
    assert engine.advance() == []
    for one in (session, fork, again):
        engine.close(one)
    with pytest.raises(KeyError):
        engine.extend(session, [1])
    with pytest.raises(ValueError, match="at least 1"):
        BestOfEngine(engine, 0, by_logprob, str)
