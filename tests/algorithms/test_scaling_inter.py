"""ScalingInter-RL: the turn limit by step, and the advantages of its episodes."""

from __future__ import annotations

import math

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.advantage import Advantage
from stages.algorithms.parts.gae import gae, gae_advantage
from stages.algorithms.parts.horizon import Horizon, limits, turn_limit
from stages.algorithms.parts.loss import denominators, kl_estimate
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError

STAGED = Horizon(kind="scaling_inter", rounds=[10, 20, 30], steps_per_stage=100, order="rising")


def limit(number: int, params: Horizon = STAGED, longest: int = 30) -> int:
    """Turn limit of step `number`, counted from 1 as in the paper."""
    return turn_limit(params, number - 1, longest)


def test_turn_limit_by_step() -> None:
    expected = {1: 10, 100: 10, 101: 20, 200: 20, 201: 30, 10000: 30}
    assert {number: limit(number) for number in expected} == expected


def test_resumed_run_has_the_same_turn_limits() -> None:
    """From any checkpoint on the limits are those of the uninterrupted run; a resumed job knows only the number of finished
    steps, as `run_loop` passes it."""
    whole = [limit(number) for number in range(1, 401)]
    for finished in range(1, 301):
        resolved = resolve(Rl(algorithm="scaling_inter", steps=400, horizon=STAGED.model_dump()))
        resumed = [resolved.turn_limit(step, 30) for step in range(finished, 400)]
        assert resumed == whole[finished:]


@pytest.mark.parametrize("steps_per_stage", [1000, 100])
def test_one_stage_equals_a_fixed_limit(steps_per_stage: int) -> None:
    """One round, or a stage longer than the run."""
    rounds = [10] if steps_per_stage == 100 else [10, 20, 30]
    staged = STAGED.model_copy(update={"rounds": rounds, "steps_per_stage": steps_per_stage})
    fixed = Horizon(kind="fixed", turns=10)
    assert [limit(number, staged) for number in range(1, 400)] == [limit(number, fixed) for number in range(1, 400)]


@pytest.mark.parametrize("rounds", [[10, 10], [10, 20, 15], [3, 2]])
def test_non_increasing_rounds_are_rejected(rounds: list[int]) -> None:
    with pytest.raises(ParamsError, match=r"rl\.horizon\.rounds must increase"):
        resolve(Rl(algorithm="scaling_inter", horizon={"rounds": rounds}))


def test_default_rounds_fit_the_environment_limit() -> None:
    """Contract: default rounds are fractions of the environment's limit, default stages of rl.steps; a limit above the
    environment's is rejected."""
    rl = resolve(Rl(algorithm="scaling_inter", steps=20)).rl
    assert rl.horizon.steps_per_stage == math.ceil(20 / 3)
    assert limits(rl.horizon, 12) == [4, 8, 12]
    assert limits(rl.horizon, 6) == [2, 4, 6]
    assert limits(rl.horizon, 2) == [1, 2]
    assert limits(rl.horizon, 1) == [1]
    assert [turn_limit(rl.horizon, step, 12) for step in (0, 6, 7, 13, 14, 19)] == [4, 4, 8, 8, 12, 12]
    with pytest.raises(ValueError, match=r"rl\.horizon\.rounds allows 30 turns.*after 12"):
        limits(STAGED, 12)
    with pytest.raises(ValueError, match=r"rl\.horizon\.turns allows 13"):
        limits(Horizon(kind="fixed", turns=13), 12)


def test_horizon_applies_to_any_algorithm_in_either_order() -> None:
    rl = Rl(algorithm="rloo", steps=6, horizon={"kind": "scaling_inter", "rounds": [1, 2, 5], "order": "falling"})
    algorithm = resolve(rl)
    assert [algorithm.turn_limit(step, 5) for step in range(6)] == [5, 5, 2, 2, 1, 1]
    assert resolve(Rl(algorithm="rloo")).turn_limit(3, 5) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "grpo", "horizon": {"rounds": [1, 2]}}, "horizon.kind: scaling_inter"),
        ({"algorithm": "grpo", "horizon": {"kind": "fixed"}}, "needs rl.horizon.turns"),
        ({"algorithm": "scaling_inter", "horizon": {"turns": 3}}, "horizon.kind: fixed"),
        ({"algorithm": "dpo", "horizon": {"kind": "fixed", "turns": 3}}, "preference pairs"),
    ],
)
def test_conflicting_settings_are_rejected(values: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate(values))


def test_final_reward_falls_on_the_last_policy_token(make_batch) -> None:
    """V = 0, gamma = lambda = 1: every policy token of two turns has advantage 1 although an observation token comes last; a
    token reward on it is an error."""
    batch = make_batch([[1.0]], turns=[[2, 2]])
    assert batch.mask[0].tolist() == [False, True, True, False, True, True, False]
    batch = batch.with_(values=torch.zeros(batch.mask.shape))
    advantages = gae_advantage(batch, Advantage(estimator="gae", level="token", gamma=1.0, lam=1.0)).advantages
    assert advantages is not None
    assert advantages[0].tolist() == [0, 1, 1, 0, 1, 1, 0]
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    assert gae(rewards, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), 1.0, 1.0).tolist() == [[1, 1, 1, 1]]
    on_observation = torch.zeros(batch.mask.shape)
    on_observation[0, -1] = 1.0
    with pytest.raises(ValueError, match="not the policy's; they would be lost"):
        gae_advantage(batch.with_(token_rewards=on_observation), Advantage(estimator="gae", level="token"))


def test_group_advantages_and_fully_truncated_group(make_batch) -> None:
    """R = (1, 0, 0, 0): (1.5, -0.5, -0.5, -0.5); a group without successes has gradients only from KL and entropy."""
    algorithm = resolve(Rl(algorithm="scaling_inter", group_size=4, advantage={"level": "trajectory"}))
    advantages = algorithm.prepare(make_batch([[1, 0, 0, 0]])).advantages
    assert advantages is not None
    torch.testing.assert_close(advantages[:, 1], torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=0, atol=1e-5)

    dead = make_batch([[0, 0, 0, 0]]).with_(truncated=torch.ones(4, dtype=torch.bool))
    dead = algorithm.prepare(dead.with_(logprobs_ref=dead.logprobs_old - 0.3 * dead.mask))
    assert dead.advantages is not None
    assert not dead.advantages.any()
    logprobs = dead.logprobs_old.clone().requires_grad_()
    total = denominators(dead, 8.0)
    terms = algorithm.loss(logprobs, torch.zeros(dead.mask.shape), dead, total)
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    kl = 0.001 * (kl_estimate(logprobs, dead.logprobs_ref, "k3") * dead.mask).sum() / total.tokens
    (of_kl,) = torch.autograd.grad(kl, logprobs)
    torch.testing.assert_close(gradient, of_kl)
    assert of_kl.abs().sum() > 0
    entropy = torch.full(dead.mask.shape, 0.7, requires_grad=True)
    (of_entropy,) = torch.autograd.grad(algorithm.loss(logprobs, entropy, dead, total).loss, entropy)
    torch.testing.assert_close(of_entropy, -0.001 * dead.mask / total.tokens)
