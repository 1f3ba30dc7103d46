"""Router-R1: right and cheap answers are rewarded, a bad format is punished, and costs are compared within a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.batch import Costs, TrajectoryBatch
from stages.algorithms.parts.cost import Cost, cost_scores
from stages.algorithms.settings import Rl
from stages.params import check_domains, parse_params
from stages.records.episode import Episode, Owner, TurnRecord
from stages.records.tools import call_terms, number_of_calls, tools_called
from stages.runtime.validation import ParamsError
from stages.training.common.batches import trajectory_batch

TOOLS = ("large", "small")


def episode(number: int, spent: float, right: float = 1.0, formed: float = 1.0) -> Episode:
    """A call that costs `spent`, then an answer; its tokens are 2, 5 of the tool's reply and 3."""
    made = Episode(f"e/{number}", "task", "d", "task", 0, "", "", 1.0, 1.0, 0)
    made.append([1], Owner.PROMPT, -1)
    made.append([2, 3], Owner.POLICY, 0, [-1.0, -0.5])
    made.append([9, 8, 7, 6, 5], Owner.ENVIRONMENT, 0)
    made.append([4, 3, 2], Owner.POLICY, 1, [-0.1, -0.2, -0.3])
    called = "large" if spent else None
    made.turns = [
        TurnRecord("search large: x", "a reply", True, 0.0, spent, "", "search large: x", 1, 3, call_terms(TOOLS, called)),
        TurnRecord("answer y", "", True, right, 0.0, "", "answer y", 8, 11, {**call_terms(TOOLS), "well_formed": formed}),
    ]
    made.reward = right
    made.reward_terms = {"well_formed": formed, "exact_match": right, "f1": max(right, 0.5), **call_terms(TOOLS, called)}
    return made


def batch(*episodes: Episode) -> TrajectoryBatch:
    return trajectory_batch(episodes)


def algorithm(**changes: Any) -> Algorithm:
    return resolve(Rl.model_validate({"algorithm": "router_r1", "group_size": 2, **changes}))


def fixed(weight: float, **changes: Any) -> Algorithm:
    """z is 1 at cost 0 and 0 at cost 100."""
    return algorithm(cost={"weight": weight, "bounds": "fixed", "dear": 100.0}, **changes)


@pytest.mark.parametrize(
    ("spent", "right", "formed", "expected"),
    [(0.0, 1.0, 1.0, 1.0), (100.0, 1.0, 1.0, 0.4), (0.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, -1.0)],
)
def test_reward_at_alpha_06(spent: float, right: float, formed: float, expected: float) -> None:
    """A right answer earns 1 if it is cheap and 0.4 if it is dear; a wrong one 0, a bad format -1 and nothing else."""
    shaped = fixed(0.6).shape(batch(episode(0, spent, right, formed)))
    assert shaped.rewards.item() == pytest.approx(expected)
    assert shaped.turn_rewards[0].tolist() == pytest.approx([0.0, expected]), "on the last turn"
    assert bool(shaped.success) == (right == 1.0), "success is the environment's"


def test_normaliser_sample_by_sample() -> None:
    """C = 100, 0, 400, 100 in a fresh window; the square roots of the last window are 10, 0, 20, 10."""
    found = cost_scores(torch.tensor([100.0, 0.0, 400.0, 100.0]), Cost(kind="normalised"), [])
    assert found.tolist() == pytest.approx([0.5, 1.0, 0.0, 0.5])


def test_normaliser_of_a_whole_step_and_of_a_full_window() -> None:
    costs = torch.tensor([100.0, 0.0, 400.0, 100.0])
    stepped = cost_scores(costs, Cost(kind="normalised", bounds="step"), [])
    assert stepped.tolist() == pytest.approx([0.5, 1.0, 0.0, 0.5])
    assert cost_scores(costs.flip(0), Cost(kind="normalised", bounds="step"), []).tolist() == stepped.flip(0).tolist()
    # The window has only the newest two: each cost is compared with the one before.
    short = cost_scores(costs, Cost(kind="normalised", window=2), [5.0])
    assert short.tolist() == pytest.approx([0.0, 1.0, 0.0, 1.0])


def test_window_grows_when_a_step_is_prepared_and_not_before() -> None:
    """Contract: shaping a batch again, when further episodes join, leaves the window as it was."""
    ours = algorithm(cost={"weight": 0.5})
    first, second = batch(episode(0, 100.0)), batch(episode(0, 100.0), episode(1, 0.0))
    ours.shape(first)
    assert ours.costs == {}
    shaped = ours.shape(second)
    assert shaped.rewards.tolist() == pytest.approx([0.75, 1.0])
    ours.prepare(shaped.with_(logprobs_ref=shaped.logprobs_old, values=torch.zeros_like(shaped.logprobs_old)))
    assert ours.costs[""] == pytest.approx([10.0, 0.0])
    other = ours.of_role("planner")
    other.prepare(other.shape(second).with_(logprobs_ref=second.logprobs_old, values=torch.zeros_like(second.logprobs_old)))
    assert ours.costs["planner"] == ours.costs[""], "a role's costs are compared with its own"
    assert ours.shape(first).rewards.tolist() == pytest.approx([0.5]), "10 is the dearest so far"


def test_alpha_0_does_not_know_prices_and_alpha_1_nothing_else() -> None:
    spent = [(0.0, 1.0), (30.0, 1.0), (60.0, 0.0)]
    free = fixed(0.0).shape(batch(*(episode(place, 0.0, right) for place, (_, right) in enumerate(spent))))
    paid = fixed(0.0).shape(batch(*(episode(place, *one) for place, one in enumerate(spent))))
    assert paid.rewards.equal(free.rewards)
    ranked = fixed(1.0).shape(batch(*(episode(place, *one) for place, one in enumerate(spent)))).rewards.tolist()
    assert ranked == pytest.approx([1.0, 1.0 - 0.3**0.5, 0.0])


def test_paying_cheap_wrong_answers_is_a_switch() -> None:
    ours = algorithm(cost={"weight": 0.6, "bounds": "fixed", "dear": 100.0, "only_correct": False})
    shaped = ours.shape(batch(episode(0, 0.0, 0.0), episode(1, 0.0, 1.0, 0.0)))
    assert shaped.rewards.tolist() == pytest.approx([0.6, -1.0])


def test_f1_and_the_format_penalty_are_settings() -> None:
    ours = fixed(0.0, settings={"metric": "f1", "malformed": 0.0})
    assert ours.shape(batch(episode(0, 0.0, 0.0), episode(1, 0.0, 1.0, 0.0))).rewards.tolist() == pytest.approx([0.5, 0.0])


def test_with_one_free_tool_and_alpha_0_it_is_ppo_with_a_format_penalty() -> None:
    good = batch(episode(0, 0.0), episode(1, 0.0, 0.0))
    ppo = resolve(Rl.model_validate({"algorithm": "ppo", "group_size": 2, "reward": {"kl_coef": 0.001}}))
    ready = {"logprobs_ref": good.logprobs_old - 0.1, "values": torch.zeros_like(good.logprobs_old)}
    prepared = [one.prepare(one.shape(good).with_(**ready)) for one in (algorithm(), ppo)]
    assert prepared[0].advantages is not None
    assert prepared[1].advantages is not None
    assert prepared[0].advantages.equal(prepared[1].advantages)
    assert algorithm().shape(batch(episode(0, 0.0, formed=0.0))).rewards.item() == -1.0


def test_replies_are_not_trained_on() -> None:
    """Contract: the mask follows who wrote a token; without a reply it is all tokens after the prompt."""
    assert batch(episode(0, 1.0)).mask[0].int().tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    alone = Episode("e/0", "task", "d", "task", 0, "", "", 1.0, 1.0, 0)
    alone.append([1], Owner.PROMPT, -1)
    alone.append([2, 3], Owner.POLICY, 0, [-1.0, -1.0])
    alone.turns = [TurnRecord("answer y", "", True, 0.0, 0.0, "", "answer y", 1, 3)]
    assert batch(alone).mask[0].tolist() == [False, True, True]


def test_calls_are_counted_apart_from_what_they_cost() -> None:
    found = batch(episode(0, 80.0), episode(1, 0.0))
    costs = found.get(Costs)
    assert costs is not None
    assert costs.spent.tolist() == [80.0, 0.0]
    assert found.tool_calls is not None
    assert found.tool_calls.tolist() == [1.0, 0.0]
    assert (found.metrics["spent"], found.metrics["calls_large"], found.metrics["calls_small"]) == (40.0, 0.5, 0.0)
    assert tools_called(episode(0, 80.0)) == 1
    plain = TurnRecord("search x", "", True, 0.0, 1.0, "", "search x", 0, 1)
    assert number_of_calls(plain) == 1.0, "without prices, a cost is a number of calls"


def test_environments_without_prices_or_formats_are_refused() -> None:
    made = episode(0, 0.0)
    made.turns = [TurnRecord("answer y", "", True, 1.0, 0.0, "", "answer y", 1, 3)]
    made.reward_terms = {"exact_match": 1.0}
    with pytest.raises(ValueError, match=r"set per_domain\.search\.environment\.route"):
        algorithm().shape(trajectory_batch([made]))
    made.reward_terms["well_formed"] = 1.0
    with pytest.raises(ValueError, match=r"rl\.cost\.kind: normalised needs priced tools"):
        algorithm().shape(trajectory_batch([made]))


def check(environment: dict[str, Any], rl: dict[str, Any]) -> None:
    values = {"domains": ["search"], "per_domain": {"search": {"environment": environment}}, "rl": rl}
    check_domains(parse_params(values))


POOL = {"pool": [{"name": "a", "price": 1.0}]}


@pytest.mark.parametrize(
    ("environment", "rl", "message"),
    [
        ({}, {"algorithm": "router_r1"}, "router_r1 routes to priced tools, and domain search has none"),
        ({}, {"cost": {"kind": "normalised"}}, "needs priced tools, and search has none"),
        ({"route": POOL, "closed_book": True}, {"algorithm": "router_r1"}, "closed_book to false"),
        ({"route": POOL, "closed_book": True}, {"cost": {"kind": "normalised"}}, "needs priced tools, and search has none"),
        ({"route": POOL}, {"cost": {"weight": 0.5}}, "rl.cost.weight has no effect here"),
        ({"route": POOL}, {"cost": {"kind": "normalised", "low": 0.9, "high": 0.1}}, "must be below rl.cost.high"),
        ({"route": POOL}, {"cost": {"kind": "normalised", "bounds": "fixed", "window": 5}}, "rl.cost.window has no effect"),
        ({"route": POOL}, {"cost": {"kind": "normalised", "bounds": "fixed", "cheap": 9.0, "dear": 3.0}}, "rl.cost.dear"),
        (
            {"route": POOL},
            {"algorithm": "router_r1", "settings": {"malformed": 0.0}, "cost": {"weight": 0.6, "only_correct": False}},
            "set malformed below 0, or only_correct to true",
        ),
        ({"route": POOL}, {"algorithm": "router_r1", "settings": {"malformed": 0.5}}, "rl.settings.malformed"),
        ({"route": POOL}, {"algorithm": "rl_plus", "cost": {"kind": "normalised"}}, "rl.external.per_group"),
    ],
)
def test_bad_settings_are_refused(environment: dict[str, Any], rl: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        check(environment, rl)


@pytest.mark.parametrize("rl", [{"algorithm": "router_r1"}, {"algorithm": "grpo", "cost": {"kind": "normalised", "weight": 0.3}}])
def test_any_method_of_episodes_may_weigh_costs(rl: dict[str, Any]) -> None:
    check({"route": POOL}, rl)


def test_equal_prices_of_a_group_give_no_advantage_under_fixed_bounds() -> None:
    given: Sequence[Episode] = [episode(place, 50.0) for place in range(3)]
    ours = resolve(Rl.model_validate({"algorithm": "grpo", "cost": {"kind": "normalised", "weight": 0.5, "bounds": "fixed"}}))
    prepared = ours.prepare(ours.shape(trajectory_batch(given)))
    assert prepared.advantages is not None
    assert not prepared.advantages.any()
