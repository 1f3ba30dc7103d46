"""Losses of the policy-gradient methods on one small batch against values computed by hand with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.advantage import GreedyReturns
from stages.algorithms.parts.loss import Loss, cispo, clipped, denominators, gspo, ppo_clip
from stages.algorithms.settings import Rl

LENGTHS = [2, 3, 4, 1]
REWARDS = [[1, 0], [0, 1]]
SHIFT = 0.1
"""log pi - log pi_old on every token."""


def batch_of(make_batch) -> TrajectoryBatch:
    batch = make_batch(REWARDS, lengths=LENGTHS)
    return batch.with_(logprobs_ref=batch.logprobs_old - 0.05 * batch.mask).with_extra(
        GreedyReturns(torch.tensor([0.0, 0.0, 1.0, 1.0]))
    )


def loss_of(make_batch, name: str, **changes) -> float:
    algorithm = resolve(Rl.model_validate({"algorithm": name, "group_size": 2, "tasks_per_step": 2, **changes}), 8)
    batch = batch_of(make_batch)
    if algorithm.needs_critic:
        batch = batch.with_(values=torch.full(batch.mask.shape, 0.5) * batch.mask)
    batch = algorithm.prepare(algorithm.resample(algorithm.shape(batch), "key"))
    logprobs = (batch.logprobs_old + SHIFT) * batch.mask
    total = denominators(batch, float(algorithm.rl.loss.constant_length or 8))
    return float(algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, total).loss)


def by_token(values: list[float]) -> np.ndarray:
    return np.concatenate([np.full(length, value) for length, value in zip(LENGTHS, values, strict=True)])


def surrogate(advantages: np.ndarray, low: float = 0.2, high: float = 0.2, ratio: float = math.exp(SHIFT)) -> np.ndarray:
    return -np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)


def logs(make_batch) -> np.ndarray:
    batch = batch_of(make_batch)
    return (batch.logprobs_old[batch.mask] + SHIFT).double().numpy()


R = [1.0, 0.0, 0.0, 1.0]
SIGNS = [1.0, -1.0, -1.0, 1.0]
STARTS = np.cumsum([0, *LENGTHS])[:-1]


def seq_mean(per_token: np.ndarray) -> float:
    return float(np.mean([part.mean() for part in np.split(per_token, STARTS[1:])]))


def whitened(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / np.sqrt(values.var() + 1e-8)


def kl_togo(coef: float) -> np.ndarray:
    """Sum of -coef * 0.05 per token, from each token to the end."""
    return np.concatenate([-coef * 0.05 * np.arange(length, 0, -1) for length in LENGTHS])


def expected(name: str, make_batch) -> float:
    half, unit = by_token([0.5 * sign for sign in SIGNS]), by_token([math.sqrt(0.5) * sign for sign in SIGNS])
    log = logs(make_batch)
    k3 = math.exp(-(SHIFT + 0.05)) - 1 + SHIFT + 0.05
    values = {
        "reinforce": lambda: float((-half * log).mean()),
        "rloo": lambda: float((-2 * half * log).mean()),
        "opo": lambda: float((-by_token([1 - 0.4, -0.4, -0.2, 1 - 0.2]) * log).mean()),
        "remax": lambda: float((-by_token([1.0, 0.0, -1.0, 0.0]) * log).mean()),
        "grpo": lambda: seq_mean(surrogate(unit)),
        "dr_grpo": lambda: float(surrogate(half).sum() / (4 * 8)),
        "gspo": lambda: seq_mean(surrogate(unit, 0.0003, 0.0004)),
        "cispo": lambda: float((-math.exp(SHIFT) * unit * log).mean()),
        "reinforce_pp": lambda: float(surrogate(whitened(by_token(R) + kl_togo(0.01))).mean()),
        "reinforce_pp_baseline": lambda: float(surrogate(whitened(half + kl_togo(0.01))).mean()),
        "ppo": lambda: float(surrogate(whitened(by_token([value - 0.5 for value in R]))).mean()),
        "meow_tea_taro": lambda: float(surrogate(whitened(by_token([value - 0.5 for value in R]) + kl_togo(0.01))).mean()),
        "lite_ppo": lambda: float(surrogate(by_token([0.5 * sign / (np.std(R, ddof=1) + 1e-6) for sign in SIGNS])).mean()),
        "vspo": lambda: seq_mean(surrogate(unit) + 0.001 * k3),
        "grpo_t": lambda: float((surrogate(unit) + 0.01 * k3).mean()),
    }
    return values[name]()


@pytest.mark.parametrize(
    "name",
    [
        *("reinforce", "rloo", "opo", "remax", "grpo", "dr_grpo", "gspo", "cispo", "reinforce_pp", "reinforce_pp_baseline"),
        *("ppo", "meow_tea_taro", "lite_ppo", "vspo", "grpo_t"),
    ],
)
def test_loss_of_each_method_matches_numpy(make_batch, name: str) -> None:
    changes = {"reward": {"density": "environment"}} if name == "meow_tea_taro" else {}
    assert loss_of(make_batch, name, **changes) == pytest.approx(expected(name, make_batch), abs=1e-5)


def test_dapo_loss_matches_numpy(make_batch) -> None:
    """Lengths 2 to 5, overlong_max 5, overlong_cache 2: penalties 0, -0.5, -1, 0; then GRPO with clip_high 0.28 and token
    mean."""
    rewards = np.array([1.0, 0.0 - 0.5, 0.0 - 1.0, 1.0])
    pairs = rewards.reshape(2, 2)
    centred = (pairs - pairs.mean(1, keepdims=True)) / (pairs.std(1, ddof=1, keepdims=True) + 1e-6)
    value = surrogate(by_token(list(centred.ravel())), 0.2, 0.28).mean()
    got = loss_of(make_batch, "dapo", reward={"overlong_max": 5, "overlong_cache": 2})
    assert got == pytest.approx(float(value), abs=1e-5)


def test_dapo_without_its_changes_equals_grpo_with_token_mean(make_batch) -> None:
    plain = loss_of(
        make_batch, "dapo", reward={"overlong_penalty": 0.0}, group_resampling={"kind": "none"}, loss={"clip_high": 0.2}
    )
    assert plain == loss_of(make_batch, "grpo", loss={"aggregation": "token_mean"})


def normalised(rewards: list[float]) -> np.ndarray:
    """GRPO's advantages of two groups of two, by token."""
    pairs = np.array(rewards).reshape(2, 2)
    centred = (pairs - pairs.mean(1, keepdims=True)) / (pairs.std(1, ddof=1, keepdims=True) + 1e-6)
    return by_token(list(centred.ravel()))


def shaped_loss(make_batch, name: str, **changes) -> float:
    """Of episodes with 3, 1, 2 and 0 tool calls."""
    algorithm = resolve(Rl.model_validate({"algorithm": name, "group_size": 2, "tasks_per_step": 2, **changes}), 8)
    batch = batch_of(make_batch).with_(tool_calls=torch.tensor([3.0, 1.0, 2.0, 0.0]))
    batch = algorithm.prepare(algorithm.resample(algorithm.shape(batch), "key"))
    logprobs = (batch.logprobs_old + SHIFT) * batch.mask
    return float(algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0)).loss)


def test_grpo_tcr_and_scr_losses_match_numpy(make_batch) -> None:
    """Correct: 1; wrong: -1 + 0.1 per call up to -0.6; length penalties 0, -0.5, -1, 0."""
    length = {"reward": {"overlong_max": 5, "overlong_cache": 2}}
    advantages = normalised([1.0, -0.9 - 0.5, -0.8 - 1.0, 1.0])
    expected_tcr = float(surrogate(advantages, 0.2, 0.28).mean())
    assert shaped_loss(make_batch, "grpo_tcr", **length) == pytest.approx(expected_tcr, abs=1e-5)
    expected_scr = seq_mean(surrogate(advantages, 0.0003, 0.0004))
    assert shaped_loss(make_batch, "grpo_scr", **length) == pytest.approx(expected_scr, abs=1e-5)


def test_vspo_prs_loss_matches_numpy(make_batch) -> None:
    """Every action was accepted: parse 1, tool call or none 1 (no_call_score), then 0.8 times the outcome."""
    k3 = math.exp(-(SHIFT + 0.05)) - 1 + SHIFT + 0.05
    advantages = normalised([1.0, 0.2, 0.2, 1.0])
    expected_loss = seq_mean(surrogate(advantages) + 0.001 * k3)
    assert shaped_loss(make_batch, "vspo_prs") == pytest.approx(expected_loss, abs=1e-5)


def test_methods_reduce_to_each_other(make_batch) -> None:
    """GRPO without std has Dr. GRPO's advantages, RLOO's are G / (G - 1) times these; PPO's clip at rho = 1 has REINFORCE's
    gradient."""
    batch = make_batch([[1, 0, 0, 1], [0, 1, 0, 0]])
    names = ("dr_grpo", "grpo", "rloo")
    changes = ({}, {"std": "none"}, {})
    dr_grpo, grpo, rloo = (
        resolve(Rl(algorithm=name, group_size=4, advantage=change), 8).prepare(batch).advantages
        for name, change in zip(names, changes, strict=True)
    )
    assert dr_grpo is not None
    torch.testing.assert_close(grpo, dr_grpo)
    torch.testing.assert_close(rloo, dr_grpo * 4 / 3)
    gradients = []
    for kind in ("ppo_clip", "policy_gradient"):
        algorithm = resolve(Rl(algorithm="reinforce", group_size=4, loss={"kind": kind}), 8)
        ready = algorithm.prepare(batch)
        logprobs = batch.logprobs_old.clone().requires_grad_()
        loss = algorithm.loss(logprobs, torch.zeros(batch.mask.shape), ready, denominators(ready, 8.0)).loss
        gradients.append(torch.autograd.grad(loss, logprobs)[0])
    torch.testing.assert_close(*gradients)


def test_gspo_with_single_tokens_equals_ppo(make_batch) -> None:
    params = Loss(kind="gspo", clip_low=0.2, clip_high=0.2)
    batch = make_batch(REWARDS, lengths=[1, 1, 1, 1])
    batch = batch.with_(advantages=torch.tensor(SIGNS)[:, None] * batch.mask)
    logprobs = (batch.logprobs_old + torch.tensor([0.3, -0.1, 0.1, -0.4])[:, None]) * batch.mask
    torch.testing.assert_close(gspo(logprobs, batch, params), ppo_clip(logprobs, batch, params))


def test_gspo_ratio_is_geometric_mean_of_token_ratios(make_batch) -> None:
    """Log-ratios (0.1, -0.1, 0.3): exp(0.1) = 1.1052."""
    batch = make_batch([[1.0]], lengths=[3])
    batch = batch.with_(advantages=batch.mask.float())
    shift = torch.zeros(batch.mask.shape)
    shift[0, 1:4] = torch.tensor([0.1, -0.1, 0.3])
    loss = gspo(batch.logprobs_old + shift, batch, Loss(kind="gspo", clip_low=0.5, clip_high=0.5))
    torch.testing.assert_close(loss[batch.mask], torch.full((3,), -1.1052), rtol=0, atol=1e-4)


def test_cispo_clips_weight_and_keeps_gradient(make_batch) -> None:
    """rho = e^2, clipped at 5: the gradient is -5 A, where PPO's clip has none."""
    batch = make_batch([[1.0]], lengths=[1])
    batch = batch.with_(advantages=batch.mask.float())
    params = Loss(kind="cispo", clip_low=1.0, clip_high=4.0)
    logprobs = ((batch.logprobs_old + 2.0) * batch.mask).requires_grad_()
    (gradient,) = torch.autograd.grad(cispo(logprobs, batch, params).sum(), logprobs)
    assert gradient[batch.mask].item() == pytest.approx(-5.0)
    assert bool(clipped(logprobs.detach(), batch, params).any())
    clip = Loss(kind="ppo_clip", clip_low=0.2, clip_high=0.2)
    (none,) = torch.autograd.grad(ppo_clip(logprobs, batch, clip).sum(), logprobs)
    assert none.abs().sum() == 0


def test_on_policy_cispo_has_gradient_of_grpo(make_batch) -> None:
    gradients = []
    for name in ("cispo", "grpo"):
        algorithm = resolve(Rl(algorithm=name, group_size=2, loss={"aggregation": "token_mean"}))
        batch = algorithm.prepare(batch_of(make_batch))
        logprobs = batch.logprobs_old.clone().requires_grad_()
        terms = algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
        gradients.append(torch.autograd.grad(terms.loss, logprobs)[0])
    torch.testing.assert_close(*gradients)


def test_remax_subtracts_greedy_return_without_groups(make_batch) -> None:
    algorithm = resolve(Rl(algorithm="remax", group_size=1))
    assert algorithm.needs_greedy
    batch = make_batch([[1], [0], [1]]).with_extra(GreedyReturns(torch.tensor([0.25, 0.5, 1.0])))
    advantages = algorithm.prepare(batch).advantages
    assert advantages is not None
    torch.testing.assert_close(advantages.abs().amax(1) * torch.tensor([1, -1, 1]), torch.tensor([0.75, -0.5, 0.0]))
    with pytest.raises(ValueError, match="greedy"):
        algorithm.prepare(make_batch([[1], [0]]))


def test_opo_with_equal_lengths_uses_group_mean(make_batch) -> None:
    opo, plain = (Rl(algorithm="reinforce", group_size=2, advantage={"mean": mean}) for mean in ("length_weighted", "group"))
    batch = make_batch(REWARDS, lengths=[3, 3, 3, 3])
    torch.testing.assert_close(resolve(opo).prepare(batch).advantages, resolve(plain).prepare(batch).advantages)


def test_advantage_clip_is_applied_last(make_batch) -> None:
    batch = resolve(Rl(algorithm="grpo", group_size=2, advantage={"clip": 0.5})).prepare(make_batch(REWARDS))
    assert batch.advantages is not None
    assert sorted(set(batch.advantages[batch.mask].tolist())) == [-0.5, 0.5]


def test_ddof_selects_sample_or_population_std(make_batch) -> None:
    """R = (1, 0, 0, 1): +/-0.8660 with n - 1, +/-1 with n."""
    for ddof, value in ((1, 0.8660), (0, 1.0)):
        algorithm = resolve(Rl(algorithm="grpo", group_size=4, advantage={"ddof": ddof}))
        advantages = algorithm.prepare(make_batch([[1, 0, 0, 1]])).advantages
        assert advantages is not None
        assert advantages.max().item() == pytest.approx(value, abs=1e-4)
