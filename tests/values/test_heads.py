import math

import pytest
import torch
from by_hand import assert_near
from torch.nn.functional import binary_cross_entropy_with_logits

from stages.values.heads import C51Head, HlGaussHead, TwoHotHead, cross_entropy, make_head
from stages.values.settings import HeadParams

CATEGORICAL = ["two_hot", "hl_gauss", "c51"]


def head(loss: str, v_min: float = 0.0, v_max: float = 1.0, bins: int = 5, sigma_ratio: float = 0.75):
    return make_head(HeadParams(loss=loss, v_min=v_min, v_max=v_max, bins=bins, sigma_ratio=sigma_ratio))


def logits_of(probabilities: torch.Tensor) -> torch.Tensor:
    """Logits whose softmax is `probabilities`."""
    return probabilities.log()


def test_two_hot_by_hand() -> None:
    """Contract: neighbours share the mass by distance, and the mean is kept exactly."""
    two_hot = head("two_hot")
    encoded = two_hot.encode(torch.tensor(0.3))
    assert_near(encoded, [0.0, 0.8, 0.2, 0.0, 0.0], atol=1e-6)
    assert_near(two_hot.decode(logits_of(encoded)), 0.3, atol=1e-6)


@pytest.mark.parametrize(
    ("target", "expected", "decoded"),
    [
        (0.5, [0.0223, 0.2299, 0.4954, 0.2299, 0.0223], 0.5),
        (0.6, [0.0038, 0.0877, 0.4104, 0.4104, 0.0877], 0.5981),
    ],
)
def test_hl_gauss_by_hand(target: float, expected: list[float], decoded: float) -> None:
    """Contract: a Gaussian's mass per bin, sigma = 0.75 bin widths, renormalised to the support."""
    gauss = head("hl_gauss")
    encoded = gauss.encode(torch.tensor(target))
    assert_near(encoded, expected, atol=5e-5)
    assert_near(gauss.decode(logits_of(encoded)), decoded, atol=5e-5)


def test_hl_gauss_loses_half_its_mass_at_the_edge() -> None:
    """Contract: a target at the very end decodes inwards (0.862 for 1), which is why the support must exceed the targets."""
    gauss = head("hl_gauss")
    assert_near(gauss.decode(logits_of(gauss.encode(torch.tensor([0.0, 1.0])))), [0.138, 0.862], atol=5e-4)


@pytest.mark.parametrize("loss", CATEGORICAL)
def test_encodings_are_distributions(loss: str) -> None:
    """Contract: non-negative and summing to 1 for every target, however far outside the support."""
    any_head = head(loss, v_min=-0.2, v_max=1.2, bins=51)
    targets = torch.cat([torch.linspace(-2, 3, 501), torch.tensor([-1e6, 1e6, math.inf, -math.inf, -0.2, 1.2])])
    encoded = any_head.encode(targets)
    assert encoded.shape == (507, 51)
    assert bool((encoded >= 0).all())
    torch.testing.assert_close(encoded.sum(-1), torch.ones(507), atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss", CATEGORICAL)
@pytest.mark.parametrize("target", [0.0, 1.0, 1e6, -1e6])
def test_gradients_are_finite_at_the_edges(loss: str, target: float) -> None:
    """Contract: finite gradient at v_min, v_max and far outside, also for extreme logits."""
    logits = torch.tensor([[50.0, -50.0, 0.0, 3.0, 1e4]], requires_grad=True)
    head(loss).loss(logits, torch.tensor([target])).sum().backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_padded_support_round_trips_targets() -> None:
    """Contract: with 4 sigma of room on both sides decode(encode(y)) is y within 1e-3 on [-1, 1]."""
    gauss = head("hl_gauss", v_min=-1.2, v_max=1.2, bins=61)
    targets = torch.linspace(-1, 1, 401)
    torch.testing.assert_close(gauss.decode(logits_of(gauss.encode(targets))), targets, atol=1e-3, rtol=0)
    assert_near(gauss.decode(logits_of(gauss.encode(torch.tensor(1.0)))), 1.0, atol=5e-5)


def test_default_support_decodes_success_probabilities() -> None:
    """Contract: the default HeadParams decode targets in [0, 1] within 1e-3."""
    default = make_head(HeadParams())
    targets = torch.linspace(0, 1, 101)
    torch.testing.assert_close(default.decode(logits_of(default.encode(targets))), targets, atol=1e-3, rtol=0)


def test_c51_projection_by_hand() -> None:
    """Contract: r + gamma z is split between neighbouring atoms; the mean is r + gamma * mean."""
    c51 = head("c51", bins=3)
    assert isinstance(c51, C51Head)
    target = c51.project(torch.tensor([0.2, 0.3, 0.5]), torch.tensor(0.25), torch.tensor(0.5))
    assert_near(target, [0.10, 0.65, 0.25], atol=1e-6)
    assert_near((target * c51.support).sum(), 0.575, atol=1e-6)


def test_c51_terminal_target_is_two_hot() -> None:
    """Contract: with discount 0 the projection is the two-hot of the reward, for a batch, clamping included."""
    c51, two_hot = head("c51"), head("two_hot")
    assert isinstance(c51, C51Head)
    rewards = torch.tensor([[0.3, 0.0], [1.0, 1.7]])
    following = torch.softmax(torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(0)), -1)
    torch.testing.assert_close(c51.project(following, rewards, torch.zeros(2, 2)), two_hot.encode(rewards))
    torch.testing.assert_close(c51.encode(rewards), two_hot.encode(rewards))


def test_c51_counts_clamped_targets_and_not_atoms() -> None:
    """Contract: of two targets over three atoms the one whose mean leaves [0, 1] is counted, not its atoms."""
    c51 = head("c51", bins=3)
    assert isinstance(c51, C51Head)
    following = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    found = c51.project(following, torch.tensor([0.25, 0.25]), torch.ones(2))
    assert (c51.clamped, c51.seen) == (1, 2)
    assert_near(found, [[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]], atol=1e-6)


def test_c51_loss_against_a_distribution() -> None:
    """Contract: the cross-entropy against a projected distribution has its minimum, the entropy, at that distribution."""
    c51 = head("c51", bins=3)
    assert isinstance(c51, C51Head)
    target = torch.tensor([0.1, 0.65, 0.25])
    floor = -(target * target.log()).sum()
    torch.testing.assert_close(c51.distribution_loss(logits_of(target), target), floor)
    assert float(c51.distribution_loss(torch.zeros(3), target)) > float(floor)


@pytest.mark.parametrize("loss", CATEGORICAL)
def test_gradient_is_predicted_minus_target(loss: str) -> None:
    """Contract: d CE / d logits = softmax(logits) - p; zero at p_hat = p; and it matches finite differences."""
    any_head = head(loss)
    target = torch.tensor([0.3, 0.85])
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    any_head.loss(logits, target).sum().backward()
    encoded = any_head.encode(target)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.softmax(logits.detach(), -1) - encoded)
    step = 1e-2
    with torch.no_grad():
        for i in range(5):
            bump = torch.zeros(2, 5)
            bump[:, i] = step
            slope = (any_head.loss(logits + bump, target) - any_head.loss(logits - bump, target)) / (2 * step)
            torch.testing.assert_close(slope, logits.grad[:, i], atol=1e-3, rtol=0)


def test_gradient_vanishes_at_the_target() -> None:
    """Contract: the loss is stationary where the prediction equals the encoded target."""
    gauss = head("hl_gauss")
    logits = logits_of(gauss.encode(torch.tensor([0.4]))).requires_grad_()
    gauss.loss(logits, torch.tensor([0.4])).sum().backward()
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-6
    for place in range(5):  # but not elsewhere, except for a shift of all logits, which changes no prediction
        for shift, moved in ((torch.full((5,), 0.7), False), (0.7 * torch.eye(5)[place], True)):
            elsewhere = (logits.detach() + shift).requires_grad_()
            gauss.loss(elsewhere, torch.tensor([0.4])).sum().backward()
            assert elsewhere.grad is not None
            assert (float(elsewhere.grad.abs().max()) > 1e-3) is moved


def test_small_sigma_is_one_hot() -> None:
    """Contract: sigma -> 0 puts all mass on the target's bin and decodes its centre (it is not two-hot)."""
    gauss = head("hl_gauss", sigma_ratio=0.05)
    encoded = gauss.encode(torch.tensor(0.55))
    assert_near(encoded, [0.0, 0.0, 1.0, 0.0, 0.0], atol=1e-6)
    assert_near((encoded * torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])).sum(), 0.5, atol=1e-6)


def test_two_hot_with_two_locations_is_binary_cross_entropy() -> None:
    """Contract: locations {0, 1} and targets in [0, 1] reduce to binary cross-entropy on the success probability."""
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(1))
    target = torch.linspace(0, 1, 7)
    expected = binary_cross_entropy_with_logits(logits[:, 1] - logits[:, 0], target, reduction="none")
    torch.testing.assert_close(head("two_hot", bins=2).loss(logits, target), expected)


def test_minimum_of_the_two_hot_loss_is_the_entropy() -> None:
    """Contract: the minimum for a (0.75, 0.25) target is 0.562, not 0."""
    encoded = head("two_hot").encode(torch.tensor(0.0625))
    assert_near(cross_entropy(logits_of(encoded.clamp(min=1e-30)), encoded), 0.5623, atol=5e-5)


def test_mse_by_hand() -> None:
    """Contract: one output, squared error per element, targets neither clamped nor given a gradient."""
    mse = head("mse")
    target = torch.tensor([1.0, 5.0], requires_grad=True)
    logits = torch.tensor([[0.5], [2.0]], requires_grad=True)
    loss = mse.loss(logits, target)
    assert mse.outputs == 1
    assert loss.tolist() == [0.25, 9.0]
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[-1.0], [-6.0]]
    assert target.grad is None


@pytest.mark.parametrize("loss", CATEGORICAL)
def test_clamped_targets_are_counted(loss: str) -> None:
    """Contract: targets outside the support are clamped to its ends and counted; those at the ends are not."""
    any_head = head(loss)
    far = any_head.encode(torch.tensor([[-3.0, 0.0, 0.5], [1.0, 1.1, 9.0]]))
    assert isinstance(any_head, TwoHotHead | HlGaussHead)
    assert (any_head.clamped, any_head.seen) == (3, 6)
    torch.testing.assert_close(far[0, 0], far[0, 1])
    torch.testing.assert_close(far[1, 2], far[1, 0])


@pytest.mark.parametrize("loss", ["mse", *CATEGORICAL])
def test_loss_and_value_are_float32_under_autocast(loss: str) -> None:
    """Contract: bfloat16 logits and autocast change neither the dtype nor the precision of loss and value."""
    any_head = head(loss, v_min=-1.2, v_max=1.2, bins=61)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, any_head.outputs, generator=generator).bfloat16()
    target = torch.rand(4, generator=generator)
    plain = any_head.loss(logits.float(), target), any_head.decode(logits.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = any_head.loss(logits, target.double()), any_head.decode(logits)
    for got, expected in zip(under, plain, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("loss", ["mse", *CATEGORICAL])
def test_shapes(loss: str) -> None:
    """Contract: any leading shape; loss and value have it, the encoding adds the bins."""
    any_head = head(loss, bins=7)
    logits, target = torch.zeros(2, 3, any_head.outputs), torch.full((2, 3), 0.4)
    assert any_head.loss(logits, target).shape == any_head.decode(logits).shape == (2, 3)
    assert any_head.encode(target).shape == ((2, 3) if loss == "mse" else (2, 3, 7))
