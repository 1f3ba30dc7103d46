"""The Gaussian head of rl's critics: the loss of DSAC-T by hand, its running spread, the twins' targets."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from stages.agent.logprobs import predicting_states
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.records.sections import params_hash
from stages.runtime.validation import ParamsError
from stages.values.gaussian import GaussianHead, standard_normal
from stages.values.heads import make_head
from stages.values.settings import ReturnDistribution
from stages.values.turn_critic import Target, TurnCriticModel, Turns, losses

RAW = math.log(math.expm1(0.5))
"""The output of which 0.5 is the softplus."""


def head_of(copies: int = 1, running: float = 0.5, **keys: Any) -> GaussianHead:
    head = make_head(ReturnDistribution.model_validate(keys), copies)
    assert isinstance(head, GaussianHead)
    head.running.fill_(running)
    return head


def test_a_return_is_both_targets_of_a_token_critic() -> None:
    """Q 1, s 0.5, b 0.5 and a return of 4: the mean's gradient is 0.25 / 0.35 * (1 - 4), the spread's, with the error clipped at
    1.5, 0.25 / 0.35 * (0.25 - 1.125) / 0.6 times the softplus's slope."""
    logits = torch.tensor([[1.0, RAW]], requires_grad=True)
    (slope,) = torch.autograd.grad(head_of().loss(logits, torch.tensor([4.0])).sum(), logits)
    assert slope[0].tolist() == pytest.approx([-3 * 0.7142857, -1.0416667 / (1 + math.exp(-RAW))], abs=1e-6)


def test_mean_and_spread_are_read_and_followed() -> None:
    """An output layer of zeros has the running spread that learning begins with; `follow` is a lerp of spread_rate."""
    head = make_head(ReturnDistribution(spread_rate=0.1), 4)
    assert isinstance(head, GaussianHead)
    zeros = torch.zeros(3, 2)
    assert head.decode(zeros).tolist() == [0.0] * 3
    torch.testing.assert_close(head.spread(zeros)[:1], head.running[:1])
    assert not head.outside(torch.tensor([1e9])).any()
    head.running.fill_(0.4)
    head.follow(torch.tensor([0.6, 0.4, 0.2, 0.4]))
    assert head.running.tolist() == pytest.approx([0.42, 0.4, 0.38, 0.4])
    assert "running" in head.state_dict()


@pytest.mark.parametrize(("twins", "values", "sampled"), [("min", [0.8, 0.8], [1.2, 1.2]), ("own", [1.0, 0.8], [0.8, 1.2])])
def test_targets_come_from_the_smaller_twin_or_from_each_own(twins: str, values: list[float], sampled: list[float]) -> None:
    """Means 1 and 0.8, spreads -0.2 and 0.4 draws of 1 away; reward 0.5 and discount 0.5."""
    head, raw = head_of(4, twins=twins), [math.log(math.expm1(spread)) for spread in (0.2, 0.4)]
    logits = torch.tensor([[[1.0, raw[0]]], [[0.8, raw[1]]]])
    target = Target.bootstrapped(head, logits, torch.tensor([0.5]), torch.tensor([0.5]), torch.tensor([1.0]))
    assert target.values.flatten().tolist() == pytest.approx([0.5 + 0.5 * value for value in values])
    assert target.sampled is not None
    means = [0.8, 0.8] if twins == "min" else [1.0, 0.8]
    spreads = [0.4, 0.4] if twins == "min" else [0.2, 0.4]
    expected = [0.5 + 0.5 * (mean + spread) for mean, spread in zip(means, spreads, strict=True)]
    assert target.sampled.flatten().tolist() == pytest.approx(expected)
    ended = Target.bootstrapped(head, logits, torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]))
    assert ended.values.tolist() == ended.sampled.tolist() == [[0.5], [0.5]]


def test_of_several_redrawn_actions_the_mean_is_expected_and_one_return_sampled() -> None:
    head = head_of(4, twins="own")
    logits = torch.tensor([[0.0, RAW], [1.0, RAW]]).expand(2, 2, 2)
    made = Target.bootstrapped(head, logits, torch.zeros(()), torch.ones(()), torch.tensor([2.0, 2.0]))
    target = made.averaged(torch.tensor([[True]]), 2)
    assert target.values.flatten().tolist() == [0.5, 0.5]
    assert target.sampled is not None
    assert target.sampled.flatten().tolist() == pytest.approx([1.0, 1.0])


@pytest.fixture(scope="module")
def backbone(tiny_policy):
    return load_policy(tiny_policy, attention="sdpa").model.base_model


@pytest.mark.slow
def test_turn_critic_learns_the_spread_of_rewards(backbone) -> None:
    """One action whose reward is 0 or 1 with equal probability: Q settles at the mean 0.5, and the spread, with the whole square
    and no clipping, at the standard deviation 0.5; with the half square at 0.354."""
    turns = Turns(torch.full((2, 4), 5), torch.tensor([[1, -1]] * 2), torch.tensor([[3]] * 2), torch.tensor([[0.0], [1.0]]))
    for half, expected in ((False, 0.5), (True, 0.5 / math.sqrt(2))):
        params = ReturnDistribution(half=half, clip=1e6, spread_rate=0.1)
        critic = TurnCriticModel(copy.deepcopy(backbone), params, predicting_states, 0).eval()
        target = copy.deepcopy(critic)
        biases = [mlp.linear.bias for mlp in critic.q]
        optimiser = torch.optim.Adam(biases, lr=0.05)
        for step in range(150):
            if step == 110:
                optimiser.param_groups[0]["lr"] = 0.01
            fresh = (turns.token_ids, turns.after[:, 0], 1)
            found = losses(critic, target, turns, 0.9, fresh, 0.5, torch.zeros(2, 2, 1))
            optimiser.zero_grad()
            found.q.sum().backward()
            optimiser.step()
            assert found.spread is not None
            assert isinstance(critic.head, GaussianHead)
            critic.head.follow(found.spread.mean((1, 2)))
        bias = biases[0].detach()
        assert float(bias[0]) == pytest.approx(0.5, abs=0.02)
        assert float(critic.head.spread(bias)) == pytest.approx(expected, abs=0.03)


def test_draws_belong_to_their_key() -> None:
    assert torch.equal(standard_normal((2, 3), 1, "x"), standard_normal((2, 3), 1, "x"))
    assert not torch.equal(standard_normal((2, 3), 1, "x"), standard_normal((2, 3), 1, "y"))
    assert float(standard_normal((20_000,), 1).abs().max()) <= 3.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "ppo", "critic": {"init": "value_model"}}, "set init to policy, or distribution to null"),
        ({"algorithm": "ppo", "critic": {"distribution": {"twins": "own"}}}, "twins has no effect with advantage.estimator: gae"),
        ({"algorithm": "ppo", "critic": {"head": {"loss": "mse"}}}, "critic.head has no effect here: it needs"),
        ({"algorithm": "archer_offline", "replay": {"records": ["rollouts"]}}, "set it to policy, or rl.critic.distribution"),
        ({"algorithm": "grpo"}, "critic.distribution has no effect here"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {**changes, "critic": {"distribution": {}, **changes.get("critic", {})}}
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate(given))


def test_it_is_off_by_default_and_changes_no_hash() -> None:
    plain = resolve(Rl(algorithm="ppo")).rl
    assert plain.critic.distribution is None
    values = plain.model_dump(mode="json")
    del values["critic"]["distribution"]
    assert params_hash(values) == params_hash(plain)
    on = resolve(Rl.model_validate({"algorithm": "ppo", "critic": {"distribution": {}}})).rl
    assert params_hash(on) != params_hash(plain)
