"""Advantages against hand-computed numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import assert_near

from algorithms.conftest import build
from stages.algorithms.batch import TrajectoryBatch, masked_whiten
from stages.algorithms.parts.advantage import Advantage, Plays, baseline, episode_advantages, group_advantage, scale


def advantages(rewards: list[list[float]], mean: str, std: str) -> torch.Tensor:
    flat = torch.tensor([reward for group in rewards for reward in group])
    group = torch.tensor([index for index, members in enumerate(rewards) for _ in members])
    return episode_advantages(flat, group, mean, std).reshape(len(rewards), -1)


@pytest.mark.parametrize(
    ("mean", "std", "value"), [("group", "group", 0.8660), ("leave_one_out", "none", 0.6667), ("group", "none", 0.5)]
)
def test_grpo_rloo_and_dr_grpo_advantages(mean: str, std: str, value: float) -> None:
    assert_near(advantages([[1, 0, 0, 1]], mean, std), [[value, -value, -value, value]], atol=1e-4)


@pytest.mark.parametrize("mean", ["group", "batch", "leave_one_out"])
@pytest.mark.parametrize("std", ["none", "group", "batch"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.3])
def test_equal_rewards_have_zero_advantage(mean: str, std: str, value: float) -> None:
    assert_near(advantages([[value] * 4, [value] * 4], mean, std), [[0.0] * 4] * 2, atol=1e-7)


def test_batch_std_uses_uncentred_rewards() -> None:
    """The std of all raw rewards with n - 1; GRPO on the same rewards for comparison."""
    rewards = [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert_near(
        scale(torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]), torch.zeros(8, dtype=torch.int64), "batch"), [0.534522] * 8, atol=1e-5
    )
    assert_near(
        advantages(rewards, "group", "batch"),
        [[1.40312, -0.46771, -0.46771, -0.46771], [0.46771, 0.46771, 0.46771, -1.40312]],
        atol=1e-5,
    )
    assert_near(advantages(rewards, "group", "group"), [[1.5, -0.5, -0.5, -0.5], [0.5, 0.5, 0.5, -1.5]], atol=1e-5)


def test_dead_group_counts_in_batch_std_and_has_zero_advantage() -> None:
    result = advantages([[1, 1, 1, 1], [1, 1, 1, 0]], "group", "batch")
    assert result[0].tolist() == [0.0] * 4
    assert_near(result[1], [0.70711, 0.70711, 0.70711, -2.12132], atol=1e-5)


def test_nearly_saturated_batch_amplifies_advantages() -> None:
    rewards = [[1, 1, 1, 1]] * 15 + [[1, 1, 1, 0]]
    assert_near(advantages(rewards, "group", "batch")[15], [2, 2, 2, -6], atol=1e-4)
    assert_near(advantages(rewards, "group", "group")[15], [0.5, 0.5, 0.5, -1.5], atol=1e-5)


@pytest.mark.parametrize("std", ["none", "group", "batch"])
def test_advantages_are_invariant_to_reward_shifts(std: str) -> None:
    """Shifting all rewards keeps the advantages; shifting one group keeps its centred rewards."""
    rewards = [[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 0.0]]
    shifted = [[value + 3 for value in group] for group in rewards]
    torch.testing.assert_close(advantages(shifted, "group", std), advantages(rewards, "group", std), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        advantages([shifted[0], rewards[1]], "group", "none"), advantages(rewards, "group", "none"), rtol=1e-5, atol=1e-6
    )


def test_one_group_makes_batch_and_group_statistics_agree() -> None:
    """With one group batch and group statistics agree; RLOO is G/(G-1) times the group-centred rewards."""
    rewards = [[1.0, 0.0, 0.25, 0.0, 1.0]]
    torch.testing.assert_close(advantages(rewards, "group", "batch"), advantages(rewards, "group", "group"))
    torch.testing.assert_close(advantages(rewards, "batch", "none"), advantages(rewards, "group", "none"))
    torch.testing.assert_close(advantages(rewards, "leave_one_out", "none"), advantages(rewards, "group", "none") * 5 / 4)


def test_batch_std_equals_group_std_up_to_bessel_for_equal_groups() -> None:
    """Groups of equal mean and variance, G = 4, N = 3: s_batch^2 (12-1)/12 = s_group^2 (4-1)/4."""
    group = torch.tensor([0] * 4 + [1] * 4 + [2] * 4)
    rewards = torch.tensor([1.0, 0, 0, 1] * 3)
    batch_std, group_std = scale(rewards, group, "batch")[0] - 1e-6, scale(rewards, group, "group")[0] - 1e-6
    torch.testing.assert_close(batch_std**2 * 11 / 12, group_std**2 * 3 / 4)


@pytest.mark.parametrize("mean", ["group", "leave_one_out"])
def test_group_of_one_is_rejected(mean: str) -> None:
    with pytest.raises(ValueError, match="group_size >= 2"):
        baseline(torch.tensor([1.0]), torch.tensor([0]), mean)


def test_group_advantage_is_zero_outside_policy_tokens(make_batch) -> None:
    batch = group_advantage(make_batch([[1, 0]], lengths=[2, 4]), Advantage(mean="group", std="none"))
    assert batch.advantages is not None
    assert batch.advantages[~batch.mask].abs().sum() == 0
    assert_near(batch.advantages[batch.mask], [0.5, 0.5, -0.5, -0.5, -0.5, -0.5], atol=1e-5)


def test_whitening_uses_only_masked_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, True, False]])
    whitened = masked_whiten(torch.tensor([[1.0, 2, 99], [3, 4, -99]]), mask)
    assert_near(whitened[mask].mean(), 0.0, atol=1e-5)
    assert_near((whitened[mask] ** 2).mean().sqrt(), 1.0, atol=1e-5)
    assert whitened[~mask].tolist() == [0.0, 0.0]


def of_plays(batch: TrajectoryBatch, plays: list[int]) -> TrajectoryBatch:
    """The batch with its rows' plays; the first row of each is its first conversation."""
    leads = [plays.index(play) == row for row, play in enumerate(plays)]
    return batch.with_extra(Plays(torch.tensor(plays), torch.tensor(leads)))


def row_values(batch: TrajectoryBatch, **params: Any) -> list[float]:
    """The advantage of each row's last policy token."""
    found = group_advantage(batch, Advantage(**params)).advantages
    assert found is not None
    return [float(found[row, batch.mask[row].nonzero()[-1, 0]]) for row in range(batch.size)]


@pytest.mark.parametrize("level", ["trajectory", "turn", "token"])
def test_plays_are_compared_once_however_many_conversations_they_have(level: str) -> None:
    """Contract: three plays with returns 1, 0, 0, of which the first has three conversations: baseline 1/3, standard deviation
    sqrt(1/3), so 1.1547 on all of its rows and -0.57735 on the others'; as rows on their own they would have baseline 3/5."""
    batch = of_plays(build([[1, 1, 1, 0, 0]], turns=[[2, 2], [3], [1, 1, 1], [2], [2, 2]]), [0, 0, 0, 1, 2])
    found = row_values(batch, estimator="group", level=level, mean="group", std="group")
    assert_near(torch.tensor(found), [1.15470, 1.15470, 1.15470, -0.57735, -0.57735], atol=1e-4)
    alone = row_values(batch.with_(extra={}), estimator="group", level=level, mean="group", std="none")
    assert_near(torch.tensor(alone), [0.4, 0.4, 0.4, -0.6, -0.6], atol=1e-6)
    out = row_values(batch, estimator="group", level=level, mean="leave_one_out", std="none")
    assert_near(torch.tensor(out), [1.0, 1.0, 1.0, -0.5, -0.5], atol=1e-6)


def test_plays_of_one_conversation_change_nothing() -> None:
    batch = build([[1, 0, 0.5], [0, 1, 1]], turns=[[2, 1], [3], [1], [2], [2, 2], [1]])
    for level in ("trajectory", "turn", "token"):
        for mean, std in (("group", "group"), ("batch", "batch"), ("leave_one_out", "none"), ("none", "none")):
            params = {"estimator": "group", "level": level, "mean": mean, "std": std}
            assert row_values(of_plays(batch, [0, 1, 2, 3, 4, 5]), **params) == row_values(batch, **params)


def test_plays_keep_their_rows_in_parts_of_a_batch() -> None:
    """Contract: parts of a batch that have a play's first row compare it; their rows are in any order."""
    batch = of_plays(build([[1, 1, 0, 0]], lengths=[2, 2, 2, 2]), [0, 0, 1, 2]).rows(torch.tensor([3, 1, 0, 2]))
    found = row_values(batch, estimator="group", level="trajectory", mean="group", std="none")
    assert_near(torch.tensor(found), [-1 / 3, 2 / 3, 2 / 3, -1 / 3], atol=1e-6)
