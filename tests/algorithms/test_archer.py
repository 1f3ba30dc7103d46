"""ArCHer's advantages and losses: hand-computed numbers, limits, rejected settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.critic import check_returns
from stages.algorithms.parts.loss import denominators
from stages.algorithms.parts.turn_critic import TurnCritic
from stages.algorithms.settings import Rl
from stages.params import parse_params
from stages.runtime.validation import ParamsError


def valued(make_batch: Any, q: list[tuple[float, float]], v: list[tuple[float, float]], tokens: list[int]) -> TrajectoryBatch:
    """One episode; per turn its number of tokens and the twin critics' values."""
    batch = make_batch([[1.0]], turns=[tokens])
    return batch.with_extra(TurnCritic(torch.tensor([q]), torch.tensor([v])))


def test_advantage_is_min_q_minus_min_v(make_batch) -> None:
    """Q = (0.7, 0.4), V = (0.5, 0.6): min Q - min V = 0.4 - 0.5 = -0.1 on every token of the turn, 0 elsewhere."""
    batch = valued(make_batch, [(0.7, 0.4), (2.0, 3.0)], [(0.5, 0.6), (1.0, 0.0)], [2, 1])
    found = resolve(Rl(algorithm="archer")).prepare(batch)
    torch.testing.assert_close(found.advantages[found.mask], torch.tensor([-0.1, -0.1, 2.0]))
    assert not found.advantages[~found.mask].any()
    assert found.metrics["q_mean"] == pytest.approx((0.4 + 2.0) / 2)
    # Q is (0.4, 2.0), the discounted returns are (0.95, 1.0): both rise.
    assert found.metrics["q_correlation"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="has none"):
        resolve(Rl(algorithm="archer")).prepare(make_batch([[1.0]]))


def loss_and_gradient(make_batch: Any, section: dict[str, Any], advantage: float) -> tuple[float, torch.Tensor]:
    """Of one turn with token log-probs -0.5 and -1."""
    algorithm = resolve(Rl.model_validate(section))
    batch = algorithm.prepare(valued(make_batch, [(advantage, advantage)], [(0.0, 0.0)], [2]))
    logprobs = torch.where(batch.mask, torch.tensor([[0.0, -0.5, -1.0, 0.0]]), torch.zeros(())).requires_grad_()
    terms = algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    return float(terms.loss.detach()), gradient[batch.mask]


def test_actor_loss_and_gradient(make_batch) -> None:
    """Log-probs (-0.5, -1), A = 2: loss 3.0, weight 2 for each token."""
    loss, gradient = loss_and_gradient(make_batch, {"algorithm": "archer"}, 2.0)
    assert loss == pytest.approx(3.0)
    assert gradient.tolist() == [-2.0, -2.0]


def test_exponential_advantage_weights(make_batch) -> None:
    """A = 0 is behaviour cloning, A = 1 has weight 2.718; inv_temp multiplies A; max_weight bounds weights."""
    for advantage, settings, weight in (
        (0.0, {}, 1.0),
        (1.0, {}, math.e),
        (1.0, {"inv_temp": 2.0}, math.e**2),
        (-1.0, {}, 1 / math.e),
        (9.0, {}, 20.0),
        (9.0, {"max_weight": 100.0}, 100.0),
    ):
        loss, gradient = loss_and_gradient(make_batch, {"algorithm": "archer_offline", "settings": settings}, advantage)
        assert loss == pytest.approx(1.5 * weight, rel=1e-5)
        assert gradient.tolist() == pytest.approx([-weight, -weight], rel=1e-5)


def test_token_baseline_is_subtracted_and_fitted_to_advantage(make_batch) -> None:
    """Each token has the advantage A - b; the target of b is A."""
    batch = valued(make_batch, [(1.0, 2.0)], [(0.5, 0.25)], [3])
    baseline = torch.tensor([[0.0, 0.1, 0.2, 0.5, 0.0]])
    algorithm = resolve(Rl(algorithm="archer", advantage={"token_baseline": True}))
    assert algorithm.needs_critic
    assert not resolve(Rl(algorithm="archer")).needs_critic
    found = algorithm.prepare(batch.with_(values=baseline))
    torch.testing.assert_close(found.advantages[found.mask], torch.tensor([0.65, 0.55, 0.25]))
    torch.testing.assert_close(found.returns[found.mask], torch.full((3,), 0.75))


def test_one_token_per_turn_equals_token_level_actor_critic(make_batch) -> None:
    """Limit: with exact values the advantages are those of undiscounted GAE with lam 0, r + V' - V."""
    values = torch.tensor([0.2, 0.6, 0.9])
    rewards = torch.tensor([0.0, 0.0, 1.0])
    q = rewards + torch.cat([values[1:], torch.zeros(1)])
    batch = make_batch([[1.0]], turns=[[1, 1, 1]])
    batch = batch.with_extra(TurnCritic(q[None, :, None].expand(-1, -1, 2), values[None, :, None].expand(-1, -1, 2)))
    found = resolve(Rl(algorithm="archer")).prepare(batch).advantages[batch.mask]
    of_tokens = torch.zeros(batch.mask.shape).masked_scatter(batch.mask, values)
    a2c = resolve(Rl(algorithm="a2c", advantage={"lam": 0.0})).prepare(batch.with_(values=of_tokens))
    torch.testing.assert_close(found, a2c.advantages[batch.mask])


REJECTED: list[tuple[dict[str, Any], str]] = [
    (
        {"algorithm": "grpo", "replay": {"tau": 0.5}},
        r"rl\.replay\.tau has no effect here: it needs advantage\.estimator: utterance",
    ),
    ({"algorithm": "grpo", "advantage": {"token_baseline": True}}, "estimator: utterance"),
    ({"algorithm": "grpo", "critic": {"init": "value_model"}}, "a method with a critic"),
    ({"algorithm": "archer", "critic": {"coef": 0.5}}, "a critic of tokens"),
    ({"algorithm": "archer", "critic": {"warmup_steps": 20}}, "leaves none of rl.steps"),
    ({"algorithm": "archer", "advantage": {"mean": "group"}}, "estimator: group"),
    ({"algorithm": "archer", "advantage": {"level": "turn"}}, "group, gae or team"),
    ({"algorithm": "archer", "advantage": {"lam": 0.9}}, "estimator: gae"),
    ({"algorithm": "archer", "replay": {"expectile": 0.9}}, "value_target: expectile"),
    ({"algorithm": "archer_offline", "replay": {"samples": 2}}, "value_target: policy"),
    ({"algorithm": "archer", "replay": {"actions": "recorded"}}, "does not correct"),
    ({"algorithm": "archer", "replay": {"actions": "played", "policy_updates": 2}}, "set policy_updates to 1"),
    (
        {"algorithm": "archer", "group_resampling": {"kind": "resample"}},
        r"rl\.group_resampling\.kind: resample applies to returns and groups",
    ),
    ({"algorithm": "archer", "credit": {"kind": "annotated"}}, r"rl\.credit\.kind: annotated"),
    ({"algorithm": "archer", "external": {"per_group": 1}}, r"rl\.replay\.records"),
    ({"algorithm": "archer", "reward": {"kl_coef": 0.1}}, r"rl\.reward\.kl_coef"),
    ({"algorithm": "archer", "epochs": 2}, "does not correct"),
    (
        {"algorithm": "archer", "critic": {"head": {"v_min": 0.0, "v_max": 1.0}}, "reward": {"density": "single"}},
        "4 sigma beyond",
    ),
    (
        {"algorithm": "archer", "critic": {"init": "value_model"}, "reward": {"correct": 2.0, "wrong": 0.0}},
        "replaces these rewards",
    ),
    ({"algorithm": "archer_offline", "replay": {"records": []}}, "has no other data"),
    ({"algorithm": "archer_offline", "replay": {"actions": "played"}}, "plays no episodes"),
    ({"algorithm": "archer_offline", "replay": {"capacity": 10}}, "plays episodes"),
    ({"algorithm": "archer_offline", "horizon": {"kind": "fixed", "turns": 3}}, "plays nothing"),
    ({"algorithm": "archer_offline", "curriculum": {"kind": "value"}}, r"rl\.curriculum\.kind has no effect"),
    ({"algorithm": "archer_offline", "selection": {"kind": "model_aware"}}, r"rl\.selection\.kind has no effect"),
    ({"algorithm": "archer_offline", "advantage": {"estimator": "group"}}, "needs episodes that the policy plays"),
    ({"algorithm": "archer_offline", "loss": {"clip_low": 0.1}}, r"rl\.loss\.clip_low has no effect"),
    ({"algorithm": "archer_offline", "settings": {"inv_temp": 0.0}}, r"'rl\.settings\.inv_temp' Input should be greater than 0"),
    ({"algorithm": "dpo", "replay": {"tau": 0.5}}, "preference pairs"),
    ({"algorithm": "dpo", "curriculum": {"floor": 0.3}}, r"rl\.curriculum\.floor has no effect"),
    (
        {"algorithm": "dpo", "selection": {"kind": "model_aware"}},
        "learns from preference pairs, not from what it plays; set it to null",
    ),
]


@pytest.mark.parametrize(("values", "message"), REJECTED)
def test_conflicting_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate(values), 64)


def test_played_actions_get_one_policy_update_by_default() -> None:
    """Contract: more updates are allowed only for losses that correct for the policy's change."""
    assert resolve(Rl.model_validate({"algorithm": "archer", "replay": {"actions": "played"}})).rl.replay.policy_updates == 1
    assert resolve(Rl(algorithm="archer")).rl.replay.policy_updates == 2
    twice = {"algorithm": "archer", "replay": {"actions": "played", "policy_updates": 2}, "loss": {"kind": "ppo_clip"}}
    assert resolve(Rl.model_validate(twice)).rl.replay.policy_updates == 2


def test_critic_support_must_contain_the_returns() -> None:
    """Contract: the default support holds returns like wordle's, -6 to 0, for either critic.init."""
    for section in ({}, {"init": "value_model"}):
        check_returns(resolve(Rl.model_validate({"algorithm": "archer", "critic": section})).rl, -6.0, 0.0)
    rl = resolve(Rl.model_validate({"algorithm": "archer", "critic": {"head": {"loss": "two_hot"}}})).rl
    check_returns(rl, 0.0, 1.0)
    with pytest.raises(ParamsError, match="returns are in"):
        check_returns(rl, -6.0, 0.0)


def test_critic_init_from_value_model_needs_equal_heads() -> None:
    """Contract: rl.critic.init: value_model is rejected where the heads differ, and under LoRA."""
    values: dict[str, Any] = {"domains": ["search"], "per_domain": {"search": {"annotate": {"tasks": 48}}}}
    parse_params({**values, "rl": {"algorithm": "ppo", "critic": {"init": "value_model"}}})
    archer = {"algorithm": "archer", "critic": {"init": "value_model"}}
    with pytest.raises(ParamsError, match=r"rl\.critic\.head is .*'mse'.*make them equal"):
        parse_params({**values, "rl": archer})
    parse_params({**values, "rl": archer, "annotate": {"value_model": {"head": {"loss": "mse"}}}})
    with pytest.raises(ParamsError, match=r"set init to policy, or rank to 0"):
        parse_params({**values, "rl": {"algorithm": "ppo", "critic": {"init": "value_model"}}, "model": {"lora": {"rank": 4}}})
