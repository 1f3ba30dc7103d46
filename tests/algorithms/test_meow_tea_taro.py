"""Multi-turn credit, estimators and reward densities against the paper's worked example. The budget of demonstrations and
episodes: tests/flows/test_experiments.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.advantage import Advantage
from stages.algorithms.parts.gae import gae_advantage
from stages.algorithms.parts.reward import Reward, shape_rewards
from stages.algorithms.parts.shaping import dense
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError


def rollout(values: tuple[float, ...] = (0.4, 0.5, 9.0, 9.0, 0.6)) -> TrajectoryBatch:
    """r = (0, .5, 0, 0, 1), m = (1, 1, 0, 0, 1): a turn of two tokens, two observation tokens, a turn of one token."""
    mask = torch.tensor([[True, True, False, False, True]])
    return TrajectoryBatch(
        token_ids=torch.zeros(1, 5, dtype=torch.int64),
        lengths=torch.tensor([5]),
        mask=mask,
        turn=torch.tensor([[0, 0, 0, 0, 1]]),
        logprobs_old=torch.zeros(1, 5),
        group=torch.tensor([0]),
        rewards=torch.tensor([1.5]),
        turn_rewards=torch.tensor([[0.5, 1.0]]),
        turns=torch.tensor([2]),
        truncated=torch.tensor([False]),
        values=torch.tensor([values]),
    )


def advantages(batch: TrajectoryBatch, **params) -> list[float]:
    result = gae_advantage(batch, Advantage(**params)).advantages
    assert result is not None
    assert result[~batch.mask].abs().sum() == 0
    return result[batch.mask].tolist()


@pytest.mark.parametrize(("lam", "expected"), [(1.0, [1.1, 1.0, 0.4]), (0.95, [1.031, 0.98, 0.4]), (0.0, [0.1, 0.6, 0.4])])
def test_token_level_skips_observations(lam: float, expected: list[float]) -> None:
    """Values at observation tokens have no effect."""
    for odd in (9.0, -3.0):
        batch = rollout((0.4, 0.5, odd, odd, 0.6))
        assert advantages(batch, gamma=1.0, lam=lam) == pytest.approx(expected, abs=1e-6)


def test_turn_level_credits_whole_turns() -> None:
    """V of a turn is V at its first token: A = (1.1, 0.4), the same for every token of a turn; the critic's target is the return
    from the turn on."""
    batch = rollout()
    assert advantages(batch, level="turn", gamma=1.0, lam=1.0) == pytest.approx([1.1, 1.1, 0.4])
    returns = gae_advantage(batch, Advantage(level="turn")).returns
    assert returns is not None
    assert returns[batch.mask].tolist() == pytest.approx([1.5, 1.5, 1.0])
    assert advantages(batch, level="turn", gamma=1.0, lam=0.0) == pytest.approx([0.5 + 0.6 - 0.4, 0.5 + 0.6 - 0.4, 0.4])


def test_without_critic_both_levels_give_reward_to_go() -> None:
    nothing = rollout((0.0,) * 5)
    for level in ("token", "turn"):
        assert advantages(nothing, level=level, gamma=1.0, lam=1.0) == pytest.approx([1.5, 1.5, 1.0])
    group = resolve(Rl(algorithm="reinforce", advantage={"level": "turn", "mean": "none"}))
    result = group.prepare(nothing).advantages
    assert result is not None
    assert result[nothing.mask].tolist() == pytest.approx([1.5, 1.5, 1.0])


def test_dense_rewards_share_one_divisor() -> None:
    """With the game's maximum 5 a loss with 3 points sums to .6, a win to 1; the paper's code gives the loss 3."""
    increments = torch.tensor([[1.0, 0.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    success = torch.tensor([False, True])
    shared = dense(increments, success, "max_total", 5.0)
    torch.testing.assert_close(shared[0], torch.tensor([0.2, 0.0, 0.4, 0.0, 0.0]))
    torch.testing.assert_close(shared.sum(1), torch.tensor([0.6, 1.0]))
    reference = dense(increments, success, "reference", 1.0)
    torch.testing.assert_close(reference.sum(1), torch.tensor([3.0, 1.0]))


def test_one_turn_makes_dense_equal_single_and_gae_reinforce(make_batch) -> None:
    """One reward of 1; GAE with lam = 1 and V = 0 gives A = R on every token."""
    batch = make_batch([[1, 0]], lengths=[3, 2])
    for density in ("single", "dense"):
        shaped = shape_rewards(batch, Reward(density=density, divisor="max_total", max_total=1.0))
        assert torch.equal(shaped.turn_rewards, batch.turn_rewards)
    valued = batch.with_(values=torch.zeros(batch.mask.shape))
    result = gae_advantage(valued, Advantage(gamma=1.0, lam=1.0)).advantages
    assert result is not None
    torch.testing.assert_close(result, batch.rewards[:, None] * batch.mask)


def test_trajectory_level_uses_only_the_reward_sum(make_batch) -> None:
    """GRPO with dense and single rewards of equal sums is identical; at turn level the position of a reward matters."""
    single = make_batch([[1, 0]], turns=[[1, 2], [2, 1]])
    spread = single.with_(turn_rewards=torch.tensor([[0.75, 0.25], [0.0, 0.0]]))
    whole = resolve(Rl(algorithm="grpo", group_size=2))
    assert torch.equal(whole.prepare(single).advantages, whole.prepare(spread).advantages)
    turns = resolve(Rl(algorithm="grpo", group_size=2, advantage={"level": "turn"}))
    assert not torch.equal(turns.prepare(single).advantages, turns.prepare(spread).advantages)


def test_rloo_advantages_and_rejected_groups_of_one(make_batch) -> None:
    rloo = resolve(Rl(algorithm="rloo", group_size=4))
    result = rloo.prepare(make_batch([[1, 0, 0, 0]])).advantages
    assert result is not None
    torch.testing.assert_close(result[:, 1], torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))
    for name in ("rloo", "grpo"):
        with pytest.raises(ParamsError, match="group_size must be at least 2"):
            resolve(Rl(algorithm=name, group_size=1))


def test_reward_without_policy_token_raises() -> None:
    """On an observation token, and on a turn without policy tokens."""
    lost = rollout().with_(token_rewards=torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]]))
    for level in ("token", "turn"):
        with pytest.raises(ValueError, match="not the policy's"):
            gae_advantage(lost, Advantage(level=level))
    silent = replace(rollout(), mask=torch.tensor([[True, True, False, False, False]]))
    with pytest.raises(ValueError, match="without policy tokens"):
        gae_advantage(silent, Advantage())
    # Without the check the recursion would lose the reward of 1.
    moved = rollout().with_(turn_rewards=torch.tensor([[0.5, 0.0]]))
    assert advantages(moved, gamma=1.0, lam=1.0) == pytest.approx([0.1, 0.0, -0.6])


@pytest.mark.parametrize("density", ["single", "dense"])
@pytest.mark.parametrize(
    "estimator",
    [
        {"estimator": "gae", "level": "token"},
        {"estimator": "gae", "level": "turn"},
        {"estimator": "group", "level": "trajectory", "mean": "group", "std": "group", "whiten": False},
        {"estimator": "group", "level": "trajectory", "mean": "leave_one_out", "whiten": False},
        {"estimator": "group", "level": "turn", "mean": "leave_one_out", "whiten": False},
    ],
    ids=["ppo_token", "ppo_turn", "grpo", "rloo", "rloo_turn"],
)
def test_every_arm_of_the_study_gives_finite_advantages(make_batch, density: str, estimator: dict) -> None:
    algorithm = resolve(
        Rl.model_validate({"algorithm": "meow_tea_taro", "group_size": 2, "reward": {"density": density}, "advantage": estimator})
    )
    batch = make_batch([[1, 0.4], [0, 1]], turns=[[1, 2], [2, 1], [1], [3]])
    batch = batch.with_(logprobs_ref=batch.logprobs_old - 0.1 * batch.mask, values=torch.zeros(batch.mask.shape))
    prepared = algorithm.prepare(algorithm.resample(algorithm.shape(batch), 0))
    assert prepared.advantages is not None
    assert prepared.advantages[prepared.mask].isfinite().all()
    assert prepared.advantages.abs().sum() > 0
    assert algorithm.needs_critic is (estimator["estimator"] == "gae")


def test_kl_in_reward_is_summed_into_the_return(make_batch) -> None:
    """0.01 * 0.1 per token: over 3 and 2 tokens the returns 1 and 0 become 0.997 and -0.002."""
    algorithm = resolve(Rl(algorithm="rloo", group_size=2, reward={"kl_coef": 0.01}))
    batch = make_batch([[1, 0]], lengths=[3, 2])
    result = algorithm.prepare(batch.with_(logprobs_ref=batch.logprobs_old - 0.1 * batch.mask)).advantages
    assert result is not None
    assert result[0].max().item() == pytest.approx(0.997 + 0.002, abs=1e-6)
