"""Advantages against hand-computed numbers of shared/methods (survey_taxonomy, lite_ppo)."""

from __future__ import annotations

import pytest
import torch

from stages.algorithms.advantage import baseline, compact, episode_advantages, gae, gae_advantage, group_advantage, scale
from stages.algorithms.contract import masked_whiten
from stages.algorithms.filling import dead_groups, forward_rows
from stages.params import Advantage


def advantages(rewards: list[list[float]], mean: str, std: str) -> torch.Tensor:
    flat = torch.tensor([reward for group in rewards for reward in group])
    group = torch.tensor([index for index, members in enumerate(rewards) for _ in members])
    return episode_advantages(flat, group, mean, std).reshape(len(rewards), -1)


def near(actual: torch.Tensor, expected: list, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("mean", "std", "value"), [("group", "group", 0.8660), ("leave_one_out", "none", 0.6667), ("group", "none", 0.5)]
)
def test_grpo_rloo_dr_grpo_numbers(mean: str, std: str, value: float) -> None:
    near(advantages([[1, 0, 0, 1]], mean, std), [[value, -value, -value, value]], 1e-4)


@pytest.mark.parametrize("mean", ["group", "batch", "leave_one_out"])
@pytest.mark.parametrize("std", ["none", "group", "batch"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.3])
def test_equal_rewards_have_no_advantage(mean: str, std: str, value: float) -> None:
    near(advantages([[value] * 4, [value] * 4], mean, std), [[0.0] * 4] * 2, 1e-7)


def test_batch_std_is_of_the_uncentred_rewards() -> None:
    """lite_ppo 1: s over all raw rewards with n-1; and GRPO on the same rewards."""
    rewards = [[1, 0, 0, 0], [1, 1, 1, 0]]
    near(scale(torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]), torch.zeros(8, dtype=torch.int64), "batch"), [0.534522] * 8)
    near(advantages(rewards, "group", "batch"), [[1.40312, -0.46771, -0.46771, -0.46771], [0.46771, 0.46771, 0.46771, -1.40312]])
    near(advantages(rewards, "group", "group"), [[1.5, -0.5, -0.5, -0.5], [0.5, 0.5, 0.5, -1.5]])


def test_a_dead_group_counts_in_the_batch_std_and_stays_exactly_zero() -> None:
    """lite_ppo 2."""
    result = advantages([[1, 1, 1, 1], [1, 1, 1, 0]], "group", "batch")
    assert result[0].tolist() == [0.0] * 4
    near(result[1], [0.70711, 0.70711, 0.70711, -2.12132])


def test_saturated_batch_amplifies() -> None:
    """lite_ppo 3."""
    rewards = [[1, 1, 1, 1]] * 15 + [[1, 1, 1, 0]]
    near(advantages(rewards, "group", "batch")[15], [2, 2, 2, -6], 1e-4)
    near(advantages(rewards, "group", "group")[15], [0.5, 0.5, 0.5, -1.5])


@pytest.mark.parametrize("std", ["none", "group", "batch"])
def test_shifts_of_the_rewards(std: str) -> None:
    """lite_ppo 6: a shift of one group leaves its centred rewards, a shift of all leaves the advantages."""
    rewards = [[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 0.0]]
    shifted = [[value + 3 for value in group] for group in rewards]
    torch.testing.assert_close(advantages(shifted, "group", std), advantages(rewards, "group", std), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        advantages([shifted[0], rewards[1]], "group", "none"), advantages(rewards, "group", "none"), rtol=1e-5, atol=1e-6
    )


def test_reductions() -> None:
    """lite_ppo 7 and survey_taxonomy 7: one group makes batch std GRPO's; RLOO is G/(G-1) times the group-centred rewards."""
    rewards = [[1.0, 0.0, 0.25, 0.0, 1.0]]
    torch.testing.assert_close(advantages(rewards, "group", "batch"), advantages(rewards, "group", "group"))
    torch.testing.assert_close(advantages(rewards, "batch", "none"), advantages(rewards, "group", "none"))
    torch.testing.assert_close(advantages(rewards, "leave_one_out", "none"), advantages(rewards, "group", "none") * 5 / 4)


def test_equal_group_statistics_make_batch_std_the_group_std_up_to_bessel() -> None:
    """lite_ppo 7: groups of equal mean and variance, G = 4, N = 3: s_batch^2 (12-1)/12 = s_group^2 (4-1)/4."""
    group = torch.tensor([0] * 4 + [1] * 4 + [2] * 4)
    rewards = torch.tensor([1.0, 0, 0, 1] * 3)
    batch_std, group_std = scale(rewards, group, "batch")[0] - 1e-6, scale(rewards, group, "group")[0] - 1e-6
    torch.testing.assert_close(batch_std**2 * 11 / 12, group_std**2 * 3 / 4)


@pytest.mark.parametrize("mean", ["group", "leave_one_out"])
def test_a_group_of_one_is_refused(mean: str) -> None:
    with pytest.raises(ValueError, match="group_size >= 2"):
        baseline(torch.tensor([1.0]), torch.tensor([0]), mean)


def test_group_advantage_is_on_policy_tokens_only(make_batch) -> None:
    batch = group_advantage(make_batch([[1, 0]], lengths=[2, 4]), Advantage(mean="group", std="none"))
    assert batch.advantages is not None
    assert batch.advantages[~batch.mask].abs().sum() == 0
    near(batch.advantages[batch.mask], [0.5, 0.5, -0.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize(("lam", "expected"), [(1.0, [0.5, 0.5, 0.5]), (0.0, [0.0, 0.0, 0.5])])
def test_gae_numbers(lam: float, expected: list[float]) -> None:
    """survey_taxonomy 6: r = (0, 0, 1), V = 0.5, gamma 1."""
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
    near(gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 1.0, lam), [expected])


def test_gae_by_hand_with_discount() -> None:
    """r = (0.1, 0, 1), V = (0.2, 0.4, 0.6), gamma 0.9, lam 0.5: d = (0.26, 0.14, 0.4), A3 = 0.4, A2 = 0.32, A1 = 0.404."""
    rewards, values = torch.tensor([[0.1, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.6]])
    near(gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.9, 0.5), [[0.404, 0.32, 0.4]])


def test_gae_skips_the_environments_tokens(make_batch) -> None:
    """Contract: the advantages of an episode do not depend on how many environment tokens lie between its turns."""
    together = make_batch([[1.0]], lengths=[5])
    apart = make_batch([[1.0]], turns=[[2, 1, 2]])
    values = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    results = []
    for batch in (together, apart):
        placed = torch.zeros(batch.mask.shape)
        placed[batch.mask] = values
        result = gae_advantage(batch.with_(values=placed), Advantage(gamma=0.9, lam=0.8))
        assert result.advantages is not None
        assert result.returns is not None
        assert result.advantages[~batch.mask].abs().sum() == 0
        torch.testing.assert_close(result.returns[batch.mask], result.advantages[batch.mask] + values)
        results.append(result.advantages[batch.mask])
    torch.testing.assert_close(results[0], results[1])


def test_gae_turn_rewards_fall_on_the_last_token_of_their_turn(make_batch) -> None:
    batch = make_batch([[1.0]], turns=[[2, 2]])
    batch = batch.with_(turn_rewards=torch.tensor([[0.25, 0.75]]), values=torch.zeros(batch.mask.shape))
    result = gae_advantage(batch, Advantage(gamma=1.0, lam=0.0))
    assert result.advantages is not None
    near(result.advantages[batch.mask], [0.0, 0.25, 0.0, 0.75])


def test_gae_refuses_to_lose_a_reward_and_to_run_without_values(make_batch) -> None:
    batch = make_batch([[1.0]], lengths=[2])
    with pytest.raises(ValueError, match="critic"):
        gae_advantage(batch, Advantage())
    batch = batch.with_(mask=torch.zeros_like(batch.mask), values=torch.zeros(batch.mask.shape))
    with pytest.raises(ValueError, match="without policy tokens"):
        gae_advantage(batch, Advantage())


def test_compact_keeps_order_and_rows_of_different_length() -> None:
    index, valid = compact(torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]], dtype=torch.bool))
    assert index[valid].tolist() == [1, 3, 0]
    assert valid.tolist() == [[True, True], [True, False]]


def test_whitening_is_over_the_mask() -> None:
    mask = torch.tensor([[True, True, False], [True, True, False]])
    whitened = masked_whiten(torch.tensor([[1.0, 2, 99], [3, 4, -99]]), mask)
    near(whitened[mask].mean(), 0.0)
    near((whitened[mask] ** 2).mean().sqrt(), 1.0)
    assert whitened[~mask].tolist() == [0.0, 0.0]


def test_dead_groups_are_counted_and_dropped(make_batch) -> None:
    batch = make_batch([[1, 1], [0, 1], [0, 0], [0.3, 0.3]])
    assert dead_groups(batch) == 3
    assert forward_rows(batch, "keep").tolist() == list(range(8))
    assert forward_rows(batch, "drop").tolist() == [2, 3]
    masked = batch.with_(mask=batch.mask & (torch.arange(8) != 3)[:, None])
    assert forward_rows(masked, "drop").tolist() == [2]
