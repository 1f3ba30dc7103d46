"""Group resampling: dead groups, dynamic sampling, row weights, episodes that ran out of tokens."""

from __future__ import annotations

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.group_resampling import (
    GroupResampling,
    dead_groups,
    forward_rows,
    mask_overlong,
    missing_groups,
    resample,
    zero_advantage_rows,
)
from stages.algorithms.parts.loss import aggregate, denominators
from stages.algorithms.settings import Rl


def test_dead_groups_are_counted(make_batch) -> None:
    assert dead_groups(make_batch([[1, 1], [0, 1], [0, 0], [0.3, 0.3]])) == 3


def test_drop_removes_only_groups_without_gradient(make_batch) -> None:
    """Contract: `dead_groups: drop` removes groups without any gradient, and only those."""
    batch = make_batch([[1, 1], [0, 1], [0, 0], [0.3, 0.3]])
    group = resolve(Rl(algorithm="grpo", group_size=2))
    assert group.forward_rows(group.prepare(batch)).tolist() == [2, 3]
    kept = resolve(Rl(algorithm="grpo", group_size=2, dead_groups="keep"))
    assert kept.forward_rows(kept.prepare(batch)).tolist() == list(range(8))
    everything = resolve(Rl(algorithm="reinforce", group_size=2))
    assert everything.forward_rows(everything.prepare(batch)).tolist() == list(range(8))
    for extra in ({"kl_coef": 0.1}, {"entropy_coef": 0.1}):
        regular = resolve(Rl(algorithm="grpo", group_size=2, loss=extra))
        assert regular.forward_rows(regular.prepare(batch)).tolist() == list(range(8))
    masked = batch.with_(mask=batch.mask & (torch.arange(8) != 3)[:, None])
    prepared = group.prepare(masked)
    assert zero_advantage_rows(prepared).tolist() == [True] * 2 + [False] * 2 + [True] * 4
    assert group.forward_rows(prepared).tolist() == [2]
    assert forward_rows(masked.with_(weight=torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1]))).tolist() == [0, 1, 4, 5, 6, 7]


def test_excluded_groups_do_not_affect_loss_or_statistics(make_batch) -> None:
    """exclude: loss, denominators and batch statistics are those of a batch without the dead groups."""
    algorithm = resolve(Rl(algorithm="lite_ppo", group_size=2, group_resampling={"kind": "exclude"}))
    whole = algorithm.prepare(algorithm.resample(make_batch([[1, 1], [0, 1], [1, 0]], lengths=[5, 5, 2, 3, 1, 4])))
    alone = algorithm.prepare(algorithm.resample(make_batch([[0, 1], [1, 0]], lengths=[2, 3, 1, 4])))
    assert whole.weights.tolist() == [0, 0, 1, 1, 1, 1]
    assert alone.weights.tolist() == [1] * 4
    assert denominators(whole, 8.0) == denominators(alone, 8.0)
    assert whole.advantages is not None
    assert alone.advantages is not None
    torch.testing.assert_close(whole.advantages[2:].amax(1), alone.advantages.amax(1))


@pytest.mark.parametrize("resampling", [{"kind": "exclude"}, {"kind": "resample"}, {"kind": "random"}])
def test_gpg_does_not_compensate_twice_for_dead_groups(make_batch, resampling: dict[str, str]) -> None:
    """Contract: groups that resampling removes from the denominators do not count in GPG's alpha. With `exclude` the loss is that
    of a batch without them; without resampling alpha gives the same."""

    def gradient(rewards: list[list[float]], lengths: list[int], **section) -> torch.Tensor:
        algorithm = resolve(Rl(algorithm="gpg", group_size=2, **section))
        batch = algorithm.prepare(algorithm.resample(make_batch(rewards, lengths=lengths), 0))
        logprobs = batch.logprobs_old.clone().requires_grad_()
        terms = algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
        return torch.autograd.grad(terms.loss, logprobs)[0]

    rewards, lengths = [[1, 0], [1, 1], [0, 0], [0, 1]], [3] * 8
    alone = gradient([[1, 0], [0, 1]], [3] * 4)
    live = [0, 1, 6, 7]
    torch.testing.assert_close(gradient(rewards, lengths)[live], alone)
    resampled = resolve(Rl(algorithm="gpg", group_size=2, group_resampling=resampling))
    assert resampled.prepare(resampled.resample(make_batch(rewards, lengths=lengths), 0)).metrics["alpha"] == 1.0
    if resampling["kind"] != "random":
        torch.testing.assert_close(gradient(rewards, lengths, group_resampling=resampling)[live], alone)


def test_gpg_alpha_counts_only_trained_episodes(make_batch) -> None:
    """overlong: mask: alpha counts the episodes in the denominators; masked returns still count in their group's mean."""
    algorithm = resolve(Rl(algorithm="gpg", group_size=2, group_resampling={"overlong": "mask"}))
    batch = make_batch([[1, 0], [1, 1], [0, 0]])
    batch = algorithm.prepare(batch.with_(overlong=torch.tensor([False, False, True, True, False, False])))
    assert batch.metrics["alpha"] == 2.0
    assert batch.advantages[:2, 1].tolist() == [1.0, -1.0]


def test_dynamic_sampling_requests_missing_groups(make_batch) -> None:
    """DAPO: groups are sampled until a batch of live ones is complete; the first of them are kept."""
    rule = GroupResampling(kind="resample", spread="std", r_max=1.0, zero_tol=1e-8)
    batch = make_batch([[1, 1], [0, 1], [0, 0]])
    assert missing_groups(batch, rule, wanted=3) == 2
    longer = make_batch([[1, 1], [0, 1], [0, 0], [1, 0], [1, 1], [0, 1], [1, 0]])
    assert missing_groups(longer, rule, wanted=3) == 0
    resampled = resample(longer, rule, 3, [])
    assert resampled.weights.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert resampled.metrics == {"live_groups": 4.0, "skipped": 0.0}
    assert missing_groups(batch, GroupResampling(kind="none"), wanted=3) == 0


def test_row_weight_equals_copies_of_the_row(make_batch) -> None:
    """Contract: a row of weight c has the loss, denominators and batch statistics of c rows."""
    weighted = make_batch([[1, 0], [0, 1]], lengths=[2, 3, 4, 1])
    algorithm = resolve(Rl(algorithm="reinforce_pp", group_size=2, reward={"kl_coef": 0.0}))
    weighted = algorithm.prepare(weighted.with_(weight=torch.tensor([3.0, 3.0, 1.0, 1.0])))
    copies = weighted.rows(torch.tensor([0, 1, 0, 1, 0, 1, 2, 3])).with_(weight=None)
    copied = algorithm.prepare(copies)
    assert copied.advantages is not None
    assert weighted.advantages is not None
    torch.testing.assert_close(copied.advantages[[0, 1, 6, 7]], weighted.advantages)
    loss = torch.rand(weighted.mask.shape, generator=torch.Generator().manual_seed(0))
    for kind in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"):
        one = aggregate(loss, weighted.mask, kind, denominators(weighted, 8.0), weighted.weight)
        other = aggregate(loss[[0, 1, 0, 1, 0, 1, 2, 3]], copied.mask, kind, denominators(copied, 8.0))
        torch.testing.assert_close(one, other)


def test_overlong_episodes_are_masked_after_the_baseline(make_batch) -> None:
    batch = make_batch([[1, 0], [0, 1]]).with_(overlong=torch.tensor([False, True, False, False]))
    algorithm = resolve(Rl(algorithm="grpo", group_size=2, group_resampling={"overlong": "mask"}))
    prepared = algorithm.prepare(batch)
    assert prepared.mask.any(1).tolist() == [True, False, True, True]
    assert prepared.advantages is not None
    assert prepared.advantages[0].max() == pytest.approx(0.7071, abs=1e-4)
    assert prepared.metrics["masked_episodes"] == 1.0
    with pytest.raises(ValueError, match="overlong"):
        mask_overlong(batch.with_(overlong=None), GroupResampling(overlong="mask"))
