"""DSAC-T: its loss by hand, the spread's fixed points, and what it reduces to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.values import gaussian as dsac_t
from stages.values.settings import GaussianCritic


def gradients(
    q: float, std: float, running: float, expected: float, sampled: float, **keys: object
) -> tuple[float, float, float]:
    """Loss of one sample of one critic, and its gradients by the mean and the spread."""
    mean, spread = torch.tensor([[q]], requires_grad=True), torch.tensor([[std]], requires_grad=True)
    targets = torch.tensor([expected]), torch.tensor([sampled])
    loss = dsac_t.critic_loss(mean, spread, *targets, torch.tensor([running]), GaussianCritic.model_validate(keys))
    by_mean, by_spread = torch.autograd.grad(loss, (mean, spread))
    return float(loss.detach()), float(by_mean), float(by_spread)


def test_one_sample_by_hand() -> None:
    """Clipped sample 2.5, ratio 0.25 / 0.35."""
    assert gradients(1.0, 0.5, 0.5, 2.0, 4.0) == pytest.approx((-0.1636905, -0.7142857, -1.0416667), abs=1e-6)


def test_a_sample_within_the_bound_is_not_clipped() -> None:
    assert gradients(1.0, 0.5, 0.5, 2.0, 2.2)[2] == pytest.approx(-0.5595238, abs=1e-6)


def test_expected_targets_can_be_switched_off() -> None:
    """The mean's gradient is then towards the sample, which is not clipped for it."""
    assert gradients(1.0, 0.5, 0.5, 2.0, 4.0, expected_target=False)[1] == pytest.approx(3 * -0.7142857, abs=1e-6)


def test_without_adjustment_the_bound_is_fixed() -> None:
    """As in DSAC: (Q - y) / (s^2 + 0.1), and (s^2 - (Q - y_c)^2) / (s^3 + 0.1) with the error clipped at 2."""
    _, by_mean, by_spread = gradients(1.0, 0.5, 0.5, 2.0, 4.0, adjusted=False, bound=2.0)
    assert (by_mean, by_spread) == pytest.approx((-1 / 0.35, (0.25 - 4) / 0.225), rel=1e-5)


def test_the_most_pessimistic_critic_gives_both_targets() -> None:
    mean, sampled = torch.tensor([[1.0], [0.8]]), torch.tensor([[0.2], [1.4]])
    assert [float(value) for value in dsac_t.most_pessimistic(mean, sampled)] == pytest.approx([0.8, 1.4])


def test_the_running_spread_begins_with_the_first_batch() -> None:
    first = dsac_t.running_spread(torch.tensor([float("nan")]), torch.tensor([[0.3, 0.5]]), 0.005)
    assert float(first) == pytest.approx(0.4)
    assert float(dsac_t.running_spread(first, torch.tensor([[0.6, 0.6]]), 0.005)) == pytest.approx(0.401)


@pytest.mark.parametrize(("running", "std", "ratio"), [(0.5, 1e-9, 2.5), (0.05, 1.0, 0.1), (5.0, 0.1, 10.0)])
def test_the_scale_of_gradients_has_limits(running: float, std: float, ratio: float) -> None:
    assert gradients(1.0, std, running, 0.0, 0.0)[1] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("half", "clip", "expected"),
    [(True, 1e6, 0.707), (False, 1e6, 1.0), (True, 3.0, 0.68)],
)
def test_fixed_point_of_the_spread_on_noise(half: bool, clip: float, expected: float) -> None:
    """Targets N(0, 1) around a mean that is right; the running spread is that of the current batch."""
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    settings = GaussianCritic(half=half, clip=clip, huber=None)
    std = torch.tensor(0.3, requires_grad=True)
    for _ in range(60):
        spread = std.expand(1, len(noise))
        loss = dsac_t.critic_loss(torch.zeros(1, len(noise)), spread, noise, noise, std.detach()[None], settings)
        std.data -= 0.3 * torch.autograd.grad(loss, std)[0]
    assert float(std.detach()) == pytest.approx(expected, abs=0.03)


def test_with_constant_spread_and_scale_one_it_is_the_squared_error() -> None:
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(2, 50, generator=generator, requires_grad=True)
    target, sampled = torch.randn(50, generator=generator), torch.randn(50, generator=generator)
    std = torch.full((2, 50), 0.7)
    running = torch.full((2,), (0.7**2 + dsac_t.SMALL) ** 0.5)
    loss = dsac_t.critic_loss(mean, std, target, sampled, running, GaussianCritic(huber=None))
    squared = 0.5 * ((mean - target) ** 2).mean(1).sum()
    found, expected = (torch.autograd.grad(value, mean)[0] for value in (loss, squared))
    assert torch.allclose(found, expected, atol=1e-6)


def test_large_errors_count_linearly() -> None:
    """Beyond the Huber bound the mean's gradient no longer grows."""
    steep, steeper = (gradients(0.0, 0.5, 0.35**0.5, y, 0.0, huber=5.0)[1] for y in (6.0, 60.0))
    assert steep == pytest.approx(-5.0)
    assert steeper == pytest.approx(-5.0)


def test_samples_stay_within_three_deviations() -> None:
    mean: Tensor = torch.zeros(2, 5000)
    drawn = dsac_t.sample(mean, torch.full_like(mean, 2.0), torch.Generator().manual_seed(3))
    assert float(drawn.abs().max()) == pytest.approx(6.0)
    assert float(drawn.std()) == pytest.approx(2.0, rel=0.05)
