"""Losses, aggregation, KL and entropy: hand-computed numbers, finite differences, micro-batch splits."""

from __future__ import annotations

import math

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.loss import Loss, aggregate, clipped, denominators, kl_estimate, log_ratio, policy_gradient, ppo_clip
from stages.algorithms.settings import Rl

CLIP = Loss(kind="ppo_clip", clip_low=0.2, clip_high=0.2)
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]


def one_token(make_batch, ratio: float, advantage: float) -> tuple[torch.Tensor, TrajectoryBatch]:
    batch = make_batch([[0.0]], lengths=[1])
    batch = batch.with_(advantages=advantage * batch.mask)
    return (batch.logprobs_old + math.log(ratio)) * batch.mask, batch


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "cut"),
    [(1.3, 1, -1.2, True), (1.3, -1, 1.3, False), (0.5, 1, -0.5, False), (0.5, -1, 0.8, True)],
)
def test_ppo_clip_values(make_batch, ratio: float, advantage: float, expected: float, cut: bool) -> None:
    logprobs, batch = one_token(make_batch, ratio, advantage)
    assert ppo_clip(logprobs, batch, CLIP).sum().item() == pytest.approx(expected, abs=1e-6)
    assert bool(clipped(logprobs, batch, CLIP).any()) is cut


def test_clip_low_and_clip_high_are_independent(make_batch) -> None:
    wide = Loss(kind="ppo_clip", clip_low=0.1, clip_high=0.28)
    assert ppo_clip(*one_token(make_batch, 1.5, 1), wide).sum().item() == pytest.approx(-1.28, abs=1e-6)
    assert ppo_clip(*one_token(make_batch, 0.5, -1), wide).sum().item() == pytest.approx(0.9, abs=1e-6)


def ready(make_batch, **changes: object) -> TrajectoryBatch:
    """Four episodes of unequal length with random advantages."""
    batch = make_batch([[1, 0], [0, 1]], turns=[[2, 3], [1], [4], [2, 1]])
    generator = torch.Generator().manual_seed(1)
    return batch.with_(advantages=torch.randn(batch.mask.shape, generator=generator) * batch.mask, **changes)


def test_on_policy_gradient_equals_reinforce(make_batch) -> None:
    """At rho = 1 the gradient is -sum(m A grad log pi) / sum(m) and nothing is clipped."""
    batch = ready(make_batch)
    logprobs = batch.logprobs_old.clone().requires_grad_()
    loss = aggregate(ppo_clip(logprobs, batch, CLIP), batch.mask, "token_mean", denominators(batch, 1.0))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert batch.advantages is not None
    torch.testing.assert_close(gradient, -batch.advantages * batch.mask / batch.mask.sum())
    plain = aggregate(policy_gradient(logprobs, batch, Loss()), batch.mask, "token_mean", denominators(batch, 1.0))
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, logprobs)[0])
    assert not clipped(logprobs, batch, CLIP).any()
    assert log_ratio(logprobs, batch).abs().max() == 0


def test_aggregation_values(make_batch) -> None:
    """Responses of 2 and 6 tokens with per-token losses 1 and 0."""
    batch = make_batch([[0, 0]], lengths=[2, 6])
    loss = torch.zeros(batch.mask.shape)
    loss[0] = 1.0
    total = denominators(batch, 8.0)
    values = {kind: aggregate(loss, batch.mask, kind, total).item() for kind in AGGREGATIONS}
    assert values == {"token_mean": 0.25, "seq_mean_token_mean": 0.5, "seq_mean_token_sum": 1.0, "constant": 0.125}
    assert aggregate(loss, batch.mask, "constant", denominators(batch, 4.0)).item() == 0.25


def test_token_mean_equals_sequence_mean_for_equal_lengths(make_batch) -> None:
    batch = make_batch([[0, 0, 0]], lengths=[4, 4, 4])
    loss = torch.randn(batch.mask.shape)
    total = denominators(batch, 1.0)
    token, sequence = (aggregate(loss, batch.mask, kind, total) for kind in AGGREGATIONS[:2])
    torch.testing.assert_close(token, sequence)


def test_episode_without_policy_tokens_is_skipped(make_batch) -> None:
    batch = make_batch([[0, 0]], lengths=[2, 2])
    masked = batch.with_(mask=batch.mask & torch.tensor([[True], [False]]))
    loss = torch.ones(batch.mask.shape)
    for kind in ("token_mean", "seq_mean_token_mean"):
        assert aggregate(loss, masked.mask, kind, denominators(masked, 1.0)).item() == 1.0
    nothing = batch.with_(mask=torch.zeros_like(batch.mask))
    for kind in AGGREGATIONS:
        assert aggregate(loss, nothing.mask, kind, denominators(nothing, 1.0)).item() == 0.0


def test_unknown_aggregation_and_estimator_are_rejected(make_batch) -> None:
    batch = make_batch([[0, 0]])
    with pytest.raises(ValueError, match="token_mean"):
        aggregate(torch.zeros(batch.mask.shape), batch.mask, "mean", denominators(batch, 1.0))
    with pytest.raises(ValueError, match="k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_kl_estimator_values() -> None:
    """For d = 0.1."""
    logprobs, reference = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.1], dtype=torch.float64)
    values = {kind: kl_estimate(logprobs, reference, kind).item() for kind in ("k1", "k2", "k3")}
    assert values == pytest.approx({"k1": 0.1, "k2": 0.005, "k3": 0.004837}, abs=1e-6)


def test_kl_estimators_match_the_exact_kl() -> None:
    """k1 and k3 have the KL as expectation over the policy's samples; k2 has the KL's gradient."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, 0.4], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((logprobs.exp() * kl_estimate(logprobs, reference, kind)).sum(), kl)
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    sampled = (logprobs.exp().detach() * kl_estimate(logprobs, reference, "k2")).sum()
    torch.testing.assert_close(torch.autograd.grad(sampled, logits)[0], exact)


def full_loss(rl: Rl, logits: torch.Tensor, batch: TrajectoryBatch, splits: int = 1) -> torch.Tensor:
    """The whole objective as a function of next-token logits [B, T, V], summed over `splits` micro-batches."""
    algorithm = resolve(rl)
    total = denominators(batch, 10.0)
    shares = []
    for index in torch.arange(batch.size).chunk(splits):
        micro = batch.rows(index)
        log_probabilities = logits[index].log_softmax(-1)
        logprobs = log_probabilities.gather(-1, micro.token_ids[..., None]).squeeze(-1) * micro.mask
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1) * micro.mask
        shares.append(algorithm.loss(logprobs, entropy, micro, total).loss)
    return torch.stack(shares).sum()


def objectives() -> list[Rl]:
    extras = {"kl_coef": 0.1, "entropy_coef": 0.05}
    kinds = [
        Rl(algorithm=name, loss={**extras, "kl_estimator": kl, "aggregation": aggregation})
        for name, kl, aggregation in zip(
            ("reinforce", "rloo", "grpo", "ppo"), ("k1", "k2", "k3", "k3"), AGGREGATIONS, strict=True
        )
    ]
    return [*kinds, Rl(algorithm="grpo", advantage={"std": "batch"}, loss={"aggregation": "token_mean"})]


def differentiable(make_batch) -> tuple[torch.Tensor, TrajectoryBatch]:
    """float64 logits and a batch whose ratios lie inside, above and below the clip range."""
    generator = torch.Generator().manual_seed(3)
    batch = ready(make_batch)
    logits = torch.randn(*batch.mask.shape, 16, generator=generator, dtype=torch.float64)
    logprobs = logits.log_softmax(-1).gather(-1, batch.token_ids[..., None]).squeeze(-1)
    noise = torch.tensor([-0.5, -0.1, 0.07, 0.4])[torch.randint(0, 4, batch.mask.shape, generator=generator)]
    reference = logprobs + 0.2 * torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64)
    return logits, batch.with_(logprobs_old=(logprobs + noise) * batch.mask, logprobs_ref=reference * batch.mask)


@pytest.mark.parametrize("rl", objectives(), ids=lambda rl: f"{rl.algorithm}-{rl.loss.aggregation}")
def test_gradients_match_finite_differences(make_batch, rl: Rl) -> None:
    logits, batch = differentiable(make_batch)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(full_loss(rl, logits, batch), logits)
    assert gradient.abs().sum() > 0
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        step = 1e-6
        with torch.no_grad():
            rise = full_loss(rl, logits + step * direction, batch) - full_loss(rl, logits - step * direction, batch)
        assert (gradient * direction).sum().item() == pytest.approx(rise.item() / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("rl", objectives(), ids=lambda rl: f"{rl.algorithm}-{rl.loss.aggregation}")
def test_loss_does_not_depend_on_micro_batch_split(make_batch, rl: Rl) -> None:
    """1, 2 or 4 micro-batches give the same loss and gradient to 1e-6."""
    logits, batch = differentiable(make_batch)
    logits = logits.float().requires_grad_()
    losses, gradients = [], []
    for splits in (1, 2, 4):
        loss = full_loss(rl, logits, batch, splits)
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, logits)[0])
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=1e-7)
        assert (gradient - gradients[0]).norm() <= 1e-6 * gradients[0].norm()
