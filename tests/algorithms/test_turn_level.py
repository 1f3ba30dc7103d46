"""Contract: turn- and step-level normalisation does not reward taking more turns (verl issue 7244).

A policy may stop after each turn, and the environment pays a bonus per turn and takes it back at the end. The return does not
depend on the length, so the true policy gradient is zero. Expectations over all groups are exact. Ours have an expected
gradient of zero; centring each turn's reward over the episodes still active, and summing along the episode, penalises more turns.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.settings import Rl

TURNS = 3
CONTINUE = 0.6
"""Probability of another turn, except after the last one, where the episode ends anyway."""


def returns_of(length: int, bonus: float, goal: float) -> list[float]:
    """Rewards of an episode of `length` turns: `bonus` per further turn, taken back at the end, where `goal` is paid."""
    return [bonus] * (length - 1) + [goal - bonus * (length - 1)]


def group(lengths: tuple[int, ...], rewards: dict[int, list[float]]) -> TrajectoryBatch:
    """A group of episodes of these lengths; one policy token and one environment token per turn."""
    count, width = len(lengths), 1 + 2 * TURNS
    mask, turn = torch.zeros(count, width, dtype=torch.bool), torch.full((count, width), -1)
    turn_rewards = torch.zeros(count, TURNS)
    for row, length in enumerate(lengths):
        for place in range(length):
            mask[row, 1 + 2 * place] = True
            turn[row, 1 + 2 * place : 3 + 2 * place] = place
        turn_rewards[row, :length] = torch.tensor(rewards[length])
    return TrajectoryBatch(
        token_ids=torch.zeros(count, width, dtype=torch.int64),
        lengths=torch.tensor([1 + 2 * length for length in lengths]),
        mask=mask,
        turn=turn,
        logprobs_old=torch.zeros(count, width),
        group=torch.zeros(count, dtype=torch.int64),
        rewards=turn_rewards.sum(1),
        turn_rewards=turn_rewards,
        turns=torch.tensor(lengths),
        truncated=torch.zeros(count, dtype=torch.bool),
    )


def probability_of(length: int) -> float:
    return CONTINUE ** (length - 1) * (1 - CONTINUE if length < TURNS else 1.0)


def scores(length: int) -> torch.Tensor:
    """d log pi / d theta of each turn's choice, theta the logit of continuing: 1 - p where it continued, -p where it stopped, and
    0 at the last turn, where there is no choice."""
    grad = torch.full((length,), 1 - CONTINUE)
    grad[-1] = -CONTINUE if length < TURNS else 0.0
    return grad


def expected_gradient(rewards: dict[int, list[float]], advantages, size: int = 2) -> float:
    """Exact expectation over all groups of sum over episodes and turns of A * score, per episode."""
    total = 0.0
    for lengths in product(range(1, TURNS + 1), repeat=size):
        probability = 1.0
        for length in lengths:
            probability *= probability_of(length)
        values = advantages(group(lengths, rewards))
        parts = [float((values[row][:length] * scores(length)).sum()) for row, length in enumerate(lengths)]
        total += probability * sum(parts) / size
    return total


def ours(level: str, mean: str, gamma: float | None = None, **axes: object):
    """Advantages by turn of the group estimator at this level."""
    section = {"level": level, "mean": mean, "gamma": gamma, **axes}
    algorithm = resolve(Rl.model_validate({"algorithm": "reinforce", "group_size": 2, "advantage": section}))

    def advantages(batch: TrajectoryBatch) -> list[torch.Tensor]:
        prepared = algorithm.prepare(batch).advantages
        assert prepared is not None
        return [prepared[row][batch.mask[row]] for row in range(batch.size)]

    return advantages


def centred_over_active_episodes(batch: TrajectoryBatch) -> list[torch.Tensor]:
    """The biased estimator: r_u minus the mean of r_u over the episodes that reached turn u, summed from u on."""
    alive = torch.arange(TURNS)[None, :] < batch.turns[:, None]
    means = (batch.turn_rewards * alive).sum(0) / alive.sum(0).clamp(min=1)
    centred = (batch.turn_rewards - means) * alive
    return list(centred.flip(1).cumsum(1).flip(1))


EQUAL = {length: returns_of(length, 0.3, 1.0) for length in range(1, TURNS + 1)}
BETTER_SHORT = {length: returns_of(length, 0.3, 1.0 / length) for length in range(1, TURNS + 1)}


def true_gradient(rewards: dict[int, list[float]]) -> float:
    """d/d theta of the expected return: sum over episodes of p * (sum of scores) * return."""
    return sum(probability_of(length) * float(scores(length).sum()) * sum(values) for length, values in rewards.items())


@pytest.mark.parametrize("level", ["trajectory", "turn", "token"])
@pytest.mark.parametrize("mean", ["group", "leave_one_out"])
def test_expected_gradient_is_zero_for_equal_returns(level: str, mean: str) -> None:
    assert true_gradient(EQUAL) == pytest.approx(0.0, abs=1e-7)
    assert expected_gradient(EQUAL, ours(level, mean)) == pytest.approx(0.0, abs=1e-6)


def test_centring_over_active_episodes_is_biased() -> None:
    """It puts a hidden penalty on every further turn."""
    assert expected_gradient(EQUAL, centred_over_active_episodes) < -0.01


@pytest.mark.parametrize("level", ["trajectory", "turn", "token"])
@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_is_unbiased_and_group_mean_is_scaled(level: str, size: int) -> None:
    """With the group's mean the gradient is (G - 1)/G times the true one."""
    exact = true_gradient(BETTER_SHORT)
    assert abs(exact) > 0.01
    assert expected_gradient(BETTER_SHORT, ours(level, "leave_one_out"), size) == pytest.approx(exact, rel=1e-5)
    assert expected_gradient(BETTER_SHORT, ours(level, "group"), size) == pytest.approx(exact * (size - 1) / size, rel=1e-5)


@pytest.mark.parametrize("level", ["turn", "token"])
@pytest.mark.parametrize("std", ["group", "batch"])
def test_std_scaling_does_not_reward_more_turns(level: str, std: str) -> None:
    """Equal returns give gradient 0; where short episodes are better the gradient stays negative."""
    assert expected_gradient(EQUAL, ours(level, "group", std=std), 3) == 0.0
    assert true_gradient(BETTER_SHORT) < -0.01
    assert expected_gradient(BETTER_SHORT, ours(level, "group", std=std), 3) < -0.01


@pytest.mark.parametrize("level", ["turn", "token"])
def test_whitening_bias_shrinks_with_batch_size(level: str) -> None:
    """Its mean is a baseline shared by all turns. That it includes the episode itself leaves a bias of order 1/N for N
    episodes."""
    found = [abs(expected_gradient(EQUAL, ours(level, "none", whiten=True), size)) for size in (2, 4, 6)]
    assert found[0] > found[1] > found[2]
    assert found[2] < 0.5 * found[0]


def test_reward_to_go_advantages_of_two_episodes() -> None:
    """Rewards (0.5, 1) and (0.25): rewards-to-go (1.5, 1) and 0.25, which the shorter episode keeps at turn 2."""
    batch = group((2, 1), {2: [0.5, 1.0], 1: [0.25]})
    first, second = ours("turn", "leave_one_out")(batch)
    torch.testing.assert_close(first, torch.tensor([1.25, 0.75]))
    torch.testing.assert_close(second, torch.tensor([-1.25]))
    first, second = ours("turn", "group", 0.5)(batch)
    torch.testing.assert_close(first, torch.tensor([(1.0 - 0.25) / 2, (1.0 - 0.25) / 2]))
    torch.testing.assert_close(second, torch.tensor([-(1.0 - 0.25) / 2]))


def test_sparse_rewards_have_the_same_credit_at_every_level() -> None:
    batch = group((3, 1), {3: [0.0, 0.0, 1.0], 1: [0.0]})
    for level in ("turn", "token"):
        for mine, whole in zip(ours(level, "group")(batch), ours("trajectory", "group")(batch), strict=True):
            torch.testing.assert_close(mine, whole)
