"""PACS: scores of whole groups fitted to labels; each formula against hand-computed numbers."""

from __future__ import annotations

import pytest
import torch
from by_hand import assert_near
from torch import Tensor

from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.methods.pacs import Labels, class_weights, episode_losses, labels, scores
from stages.algorithms.parts.advantage import Smoothing
from stages.algorithms.parts.loss import denominators
from stages.algorithms.parts.whole_groups import GroupSizes
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError
from stages.training.common.batches import take

Y = [1.0, 0.0, 0.0, 0.0]
R = [0.2, -0.1, 0.0, 0.3]
PSI = [0.133333, -0.266667, -0.133333, 0.266667]
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def pacs(size: int = 4, **settings) -> Rl:
    return Rl(algorithm="pacs", group_size=size, settings=settings)


def logprobs_at(batch: TrajectoryBatch, proxies: list[float]) -> Tensor:
    """Log-probs whose sum over an episode's tokens exceeds the old ones' by `proxies`."""
    share = torch.tensor(proxies) / batch.mask.sum(1)
    return ((batch.logprobs_old + share[:, None]) * batch.mask).requires_grad_()


def losses(make_batch, rewards: list[float], proxies: list[float], **settings) -> tuple[Tensor, Tensor]:
    """Losses [B] of one group's episodes, and dL/dr [B] of their mean L."""
    algorithm = resolve(pacs(len(rewards), **settings))
    batch = algorithm.prepare(make_batch([rewards], lengths=[2, 3, 1, 4][: len(rewards)]))
    logprobs = logprobs_at(batch, proxies)
    found = episode_losses(logprobs, batch, algorithm.rl)
    (gradient,) = torch.autograd.grad(found.mean(), logprobs)
    # dL/dr is the gradient at any token of the episode.
    return found.detach(), torch.stack([row[mask][0] for row, mask in zip(gradient, batch.mask, strict=True)])


def test_scores_and_losses_of_one_group(make_batch) -> None:
    psi = scores(torch.tensor(R), ONE_GROUP, "rloo")
    assert_near(psi, PSI, atol=2e-6)
    assert float(psi.sum()) == pytest.approx(0, abs=1e-6)
    plain, _ = losses(make_batch, Y, R, class_weight="none")
    assert_near(plain, [0.628701, 0.568677, 0.628701, 0.835343], atol=2e-6)
    assert float(plain.mean()) == pytest.approx(0.665355, abs=1e-6)
    assert float(losses(make_batch, Y, R)[0].mean()) == pytest.approx(0.653137, abs=1e-6)


def test_method_loss_is_the_mean_over_episodes(make_batch) -> None:
    algorithm = resolve(pacs())
    batch = algorithm.prepare(make_batch([Y], lengths=[2, 3, 1, 4]))
    terms = algorithm.loss(logprobs_at(batch, R), torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
    assert float(terms.loss.detach()) == pytest.approx(0.653137, abs=1e-6)


def test_first_gradient_equals_rloo(make_batch) -> None:
    """At r = 0 without class weights it is -(y_i - mean y)/(G - 1), exactly RLOO's with seq_mean_token_sum; beta scales it."""
    _, gradient = losses(make_batch, Y, [0.0] * 4, class_weight="none")
    assert_near(gradient, [-0.25, 0.083333, 0.083333, 0.083333], atol=2e-6)
    assert_near(
        losses(make_batch, Y, [0.0] * 4, class_weight="none", beta=2.0)[1], [-0.5, 0.166667, 0.166667, 0.166667], atol=2e-6
    )
    rewards = [[1, 0, 0, 1], [0, 0, 1, 0]]
    rloo = Rl(algorithm="rloo", group_size=4, loss={"aggregation": "seq_mean_token_sum"})
    gradients = []
    for rl in (rloo, pacs(class_weight="none")):
        algorithm = resolve(rl)
        batch = algorithm.prepare(make_batch(rewards, lengths=[2, 3, 1, 4, 1, 2, 3, 2]))
        logprobs = batch.logprobs_old.clone().requires_grad_()
        terms = algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
        gradients.append(torch.autograd.grad(terms.loss, logprobs)[0])
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)


def test_class_weights(make_batch) -> None:
    """Balanced, only_positive and only_negative; reported advantages are minus the gradient times B."""
    assert_near(class_weights(torch.tensor(Y), ONE_GROUP, "group_balanced"), [2.0, 2 / 3, 2 / 3, 2 / 3], atol=2e-6)
    _, gradient = losses(make_batch, Y, [0.0] * 4)
    assert_near(gradient, [-0.333333, 0.111111, 0.111111, 0.111111], atol=2e-6)
    batch = resolve(pacs()).prepare(make_batch([Y]))
    assert batch.advantages is not None
    assert_near(batch.advantages[:, 1], [4 / 3, -4 / 9, -4 / 9, -4 / 9], atol=2e-6)
    assert class_weights(torch.tensor([1.0, 0.5, 0.0]), ONE_GROUP[:3], "only_positive").tolist() == [1, 0, 0]
    assert class_weights(torch.tensor([1.0, 0.5, 0.0]), ONE_GROUP[:3], "only_negative").tolist() == [0, 0, 1]


def test_group_of_one_class_shrinks_score_differences(make_batch) -> None:
    _, still = losses(make_batch, [1.0] * 4, [0.0] * 4)
    assert_near(still, [0.0] * 4, atol=1e-7)
    _, gradient = losses(make_batch, [1.0] * 4, R)
    assert_near(gradient, [0.011095, -0.022091, -0.011095, 0.022091], atol=2e-6)
    assert float(gradient.sum()) == pytest.approx(0, abs=1e-7)


def test_scores_are_shift_invariant_except_naive() -> None:
    proxy = torch.tensor(R, dtype=torch.float64)
    for kind, changes in (("rloo", False), ("grpo", False), ("naive", True)):
        same = torch.allclose(scores(proxy, ONE_GROUP, kind), scores(proxy + 0.7, ONE_GROUP, kind), atol=1e-9)
        assert same != changes, kind


def test_standardised_score_has_finite_gradient_at_equal_proxies() -> None:
    """(r - mean) / (std + 1e-6): where all r are equal the gradient is finite, of order 1e6."""
    proxy = torch.tensor(R, dtype=torch.float64)
    expected = (proxy - proxy.mean()) / (proxy.std() + 1e-6)
    torch.testing.assert_close(scores(proxy, ONE_GROUP, "grpo"), expected)
    equal = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(scores(equal, ONE_GROUP, "grpo")[0], equal)
    torch.testing.assert_close(gradient, torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=torch.float64) * 1e6)


def test_loss_rejects_split_groups_and_ignores_group_order(make_batch) -> None:
    algorithm = resolve(pacs(3, class_weight="none"))
    batch = algorithm.prepare(make_batch([[1, 0, 0], [1, 1, 0]], lengths=[2, 3, 1, 4, 2, 2]))
    total = denominators(batch, 8.0)
    shift = torch.linspace(-0.4, 0.5, 6)[:, None]

    def loss(rows: list[int]) -> float:
        micro = take(batch, rows)
        logprobs = (micro.logprobs_old + shift[rows]) * micro.mask
        return float(algorithm.loss(logprobs, torch.zeros(micro.mask.shape), micro, total).loss)

    whole = loss([0, 1, 2, 3, 4, 5])
    assert loss([3, 4, 5, 0, 1, 2]) == pytest.approx(whole, rel=1e-6)
    assert loss([0, 1, 2]) + loss([5, 4, 3]) == pytest.approx(whole, rel=1e-6)
    with pytest.raises(ValueError, match=r"1 of the 3 rows of group 1"):
        loss([0, 1, 2, 3])
    part = take(batch.with_extra(GroupSizes(torch.tensor([2, 2, 1, 2, 2, 1]))), [0, 1])
    alone = algorithm.loss((part.logprobs_old + shift[:2]) * part.mask, torch.zeros(part.mask.shape), part, total)
    assert float(alone.loss) + loss([3, 4, 5]) != pytest.approx(whole, rel=1e-3), "a split group changes the loss"
    with pytest.raises(ValueError, match=r"Algorithm\.prepare"):
        algorithm.loss(batch.logprobs_old, torch.zeros(batch.mask.shape), batch.with_(extra={}), total)


def test_saturated_score_has_vanishing_residual() -> None:
    psi = scores(torch.tensor([20.0, 0.0, 0.0, 0.0], dtype=torch.float64), ONE_GROUP, "rloo")
    assert_near(psi, [20.0, -6.6667, -6.6667, -6.6667], atol=5e-5)
    residual = psi.sigmoid() - torch.tensor(Y, dtype=torch.float64)
    assert float(residual[0]) == pytest.approx(-2.1e-9, rel=0.05)
    assert_near(residual[1:], [1.27e-3] * 3, atol=5e-6)


def test_tokens_outside_the_mask_do_not_affect_the_loss(make_batch) -> None:
    """Padding and environment tokens may have any log-probability."""
    algorithm = resolve(pacs(2))
    batch = algorithm.prepare(make_batch([[1, 0]], turns=[[2, 3], [1]]))
    logprobs = (batch.logprobs_old + 0.1) * batch.mask
    other = torch.where(batch.mask, logprobs, torch.full_like(logprobs, -3.0))
    total = denominators(batch, 8.0)
    found = [float(algorithm.loss(one, torch.zeros(batch.mask.shape), batch, total).loss) for one in (logprobs, other)]
    assert found[0] == found[1]
    strange = batch.with_(logprobs_old=torch.where(batch.mask, batch.logprobs_old, torch.full_like(logprobs, -7.0)))
    assert float(algorithm.loss(logprobs, torch.zeros(batch.mask.shape), strange, total).loss) == found[0]


@pytest.mark.parametrize("settings", [{}, {"score": "grpo"}, {"score": "naive"}, {"reward_proxy": "mean_logp"}, {"beta": 3.0}])
def test_gradient_matches_finite_differences(make_batch, settings: dict) -> None:
    """Every episode's loss has gradients for the tokens of its whole group."""
    algorithm = resolve(pacs(3, **settings))
    batch = algorithm.prepare(make_batch([[1, 0, 0], [1, 1, 0]], lengths=[2, 3, 1, 4, 2, 2]))
    batch = batch.with_(logprobs_old=batch.logprobs_old.double())
    total = denominators(batch, 8.0)
    generator = torch.Generator().manual_seed(1)
    start = (batch.logprobs_old + 0.3 * torch.randn(batch.mask.shape, generator=generator).double()) * batch.mask

    def value(logprobs: Tensor) -> Tensor:
        return algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, total).loss

    logprobs = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(logprobs), logprobs)
    for row, column in ((0, 1), (1, 3), (5, 2)):
        step = torch.zeros_like(start)
        step[row, column] = 1e-5
        numeric = float(value(start + step) - value(start - step)) / 2e-5
        assert float(gradient[row, column]) == pytest.approx(numeric, rel=1e-4, abs=1e-8)


def test_labels_of_truncated_episodes_and_soft_rewards(make_batch) -> None:
    """A truncated episode has label 0; soft labels must be in [0, 1]."""
    batch = make_batch([[1, 0.6, 0.4, 1]]).with_(truncated=torch.tensor([False, False, False, True]))
    assert labels(batch, 0.5).tolist() == [1, 1, 0, 0]
    assert_near(labels(batch, None), [1.0, 0.6, 0.4, 0.0], atol=2e-6)
    with pytest.raises(ValueError, match=r"from -1 to 1; labels must be in \[0, 1\]"):
        labels(make_batch([[1, -1]]), None)


def test_masked_episodes_do_not_count_in_class_weights(make_batch) -> None:
    """Contract: with group_resampling.overlong: mask, classes are balanced over the trained rows, and the loss is that of a group
    without the masked ones."""
    algorithm = resolve(Rl(algorithm="pacs", group_size=4, group_resampling={"overlong": "mask"}))
    batch = make_batch([Y], lengths=[2, 3, 1, 4])
    batch = algorithm.prepare(batch.with_(overlong=torch.tensor([False, False, True, True])))
    assert_near(batch.get(Labels).weight, [1.0, 1.0, 0.0, 0.0], atol=1e-6)
    assert_near(batch.advantages[:, 1], [1.0, -1.0, 0.0, 0.0], atol=1e-6)
    picked = batch.rows(torch.tensor([0, 1]))
    assert picked.get(GroupSizes).members.tolist() == [2, 2]
    expected, _ = losses(make_batch, Y[:2], [0.3, -0.2])
    assert_near(episode_losses(logprobs_at(picked, [0.3, -0.2]), picked, algorithm.rl).detach(), expected.tolist(), atol=1e-6)


def test_reference_start_measures_from_the_frozen_policy(make_batch) -> None:
    """settings.reference: start: r is relative to the frozen policy, whose log-probs the batch must have."""
    algorithm = resolve(pacs(2, reference="start"))
    assert algorithm.needs_reference
    assert not resolve(pacs(2)).needs_reference
    batch = algorithm.prepare(make_batch([[1, 0]], lengths=[2, 2]))
    total, nothing = denominators(batch, 8.0), torch.zeros(batch.mask.shape)
    with pytest.raises(ValueError, match="start policy's log-probabilities"):
        algorithm.loss(batch.logprobs_old, nothing, batch, total)
    moved = batch.with_(logprobs_ref=batch.logprobs_old - torch.tensor([[0.1], [0.0]]) * batch.mask)
    expected = losses(make_batch, [1.0, 0.0], [0.2, 0.0])[0].mean()
    assert float(algorithm.loss(batch.logprobs_old, nothing, moved, total).loss) == pytest.approx(
        float(expected.mean()), abs=1e-6
    )


def test_row_weights_and_smoothing_apply_to_the_loss(make_batch) -> None:
    """Contract: group resampling acts as on advantages: weights count rows, smoothing scales their losses."""
    algorithm = resolve(pacs(2))
    batch = algorithm.prepare(make_batch([[1, 0]], lengths=[2, 2]))
    total, nothing = denominators(batch, 8.0), torch.zeros(batch.mask.shape)
    once = float(algorithm.loss(batch.logprobs_old, nothing, batch, total).loss)
    twice = batch.with_(weight=torch.tensor([2.0, 2.0])).with_extra(Smoothing(torch.tensor([0.5, 0.5])))
    assert float(algorithm.loss(batch.logprobs_old, nothing, twice, total).loss) == pytest.approx(once)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": {"kind": "ppo_clip"}}, "replaces both advantage and loss"),
        ({"advantage": {"estimator": "group"}}, "replaces both advantage and loss"),
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"loss": {"clip_high": 0.3}}, r"rl\.loss\.clip_high has no effect"),
        ({"advantage": {"whiten": True}}, "not from advantages"),
        ({"credit": {"kind": "annotated"}}, "not from advantages"),
        ({"advantage": {"mean": "group"}}, "estimator: group"),
        ({"settings": {"reward_proxy": "mean_logp", "reference": "start"}}, "reference has no effect"),
        ({"settings": {"beta": 0.0}}, "rl.settings.beta"),
    ],
)
def test_conflicting_settings_are_rejected(values: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate({"algorithm": "pacs", **values}))
