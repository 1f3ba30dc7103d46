"""GAE over policy tokens and over turns, against hand-computed numbers."""

from __future__ import annotations

import pytest
import torch
from by_hand import assert_near

from stages.algorithms.parts.advantage import Advantage
from stages.algorithms.parts.gae import compact, gae, gae_advantage


@pytest.mark.parametrize(("lam", "expected"), [(1.0, [0.5, 0.5, 0.5]), (0.0, [0.0, 0.0, 0.5])])
def test_gae_limits_of_lambda(lam: float, expected: list[float]) -> None:
    """r = (0, 0, 1), V = 0.5, gamma 1."""
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
    assert_near(gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 1.0, lam), [expected], atol=1e-5)


def test_gae_with_discount() -> None:
    """r = (0.1, 0, 1), V = (0.2, 0.4, 0.6), gamma 0.9, lam 0.5: d = (0.26, 0.14, 0.4), A3 = 0.4, A2 = 0.32, A1 = 0.404."""
    rewards, values = torch.tensor([[0.1, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.6]])
    assert_near(gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.9, 0.5), [[0.404, 0.32, 0.4]], atol=1e-5)


def test_gae_skips_environment_tokens(make_batch) -> None:
    """Contract: advantages do not depend on how many environment tokens lie between the turns."""
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
    assert_near(result.advantages[batch.mask], [0.0, 0.25, 0.0, 0.75], atol=1e-5)


def test_gae_rejects_lost_rewards_and_missing_values(make_batch) -> None:
    batch = make_batch([[1.0]], lengths=[2])
    with pytest.raises(ValueError, match="critic"):
        gae_advantage(batch, Advantage())
    batch = batch.with_(mask=torch.zeros_like(batch.mask), values=torch.zeros(batch.mask.shape))
    with pytest.raises(ValueError, match=r"without policy tokens, .* set rl\.algorithm to one that credits episodes"):
        gae_advantage(batch, Advantage())


def test_compact_keeps_order_and_rows_of_different_length() -> None:
    index, valid = compact(torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]], dtype=torch.bool))
    assert index[valid].tolist() == [1, 3, 0]
    assert valid.tolist() == [[True, True], [True, False]]
