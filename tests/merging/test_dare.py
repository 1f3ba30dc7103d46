import pytest
import torch

from stages.merging.methods.dare import drop_at_random, rescale_kept
from stages.merging.streaming import tensor_generator

from .helpers import bound, merge


@pytest.mark.parametrize(
    ("rescale", "expected"),
    [("inverse_density", [8.0, 0.0, 0.0, 12.0]), ("l1", [4.8, 0.0, 0.0, 7.2]), ("none", [4.0, 0.0, 0.0, 6.0])],
)
def test_rescaling_by_hand(rescale: str, expected: list[float]) -> None:
    """Contract: inverse_density divides the kept entries by p, l1 preserves the tensor's L1 norm, none does not rescale."""
    delta, mask = torch.tensor([4.0, -2.0, 0.0, 6.0]), torch.tensor([True, False, True, True])
    torch.testing.assert_close(rescale_kept(delta, mask, 0.5, rescale), torch.tensor(expected))


def test_l1_rescaling_of_fully_dropped_tensor_is_zero() -> None:
    """Contract: a tensor that lost every entry becomes 0, not NaN."""
    assert rescale_kept(torch.ones(2), torch.zeros(2, dtype=torch.bool), 0.5, "l1").tolist() == [0.0, 0.0]


def test_dare_is_unbiased_only_with_inverse_density() -> None:
    """Contract: the mean over many seeds is the delta for inverse_density; without rescaling it is density times the delta."""
    delta = torch.tensor([4.0, -2.0, 0.0, 6.0])
    means = {
        rescale: torch.stack([merge("dare", [delta], seed=seed, density=0.5, rescale=rescale) for seed in range(2000)]).mean(0)
        for rescale in ("inverse_density", "none")
    }
    # One entry has standard error |delta| / sqrt(2000), about 0.13 for the largest; four of them bound the deviation.
    torch.testing.assert_close(means["inverse_density"], delta, atol=0.54, rtol=0)
    torch.testing.assert_close(means["none"], delta / 2, atol=0.27, rtol=0)


def test_dare_with_density_one_is_task_arithmetic() -> None:
    """Contract: density 1 reduces to task arithmetic, whatever the rescaling."""
    generator = torch.Generator().manual_seed(0)
    base, *models = torch.randn(3, 4, 5, generator=generator)
    plain = merge("task_arithmetic", models, base=base, lam=0.7)
    for rescale in ("inverse_density", "l1", "none"):
        torch.testing.assert_close(merge("dare", models, base=base, lam=0.7, density=1.0, rescale=rescale), plain)


def test_dare_ties_with_density_one_is_ties() -> None:
    """Contract: density 1 reduces to TIES with density 1 and the same normalisation; dare_ties defaults to normalize false."""
    generator = torch.Generator().manual_seed(0)
    models = list(torch.randn(3, 4, 5, generator=generator))
    torch.testing.assert_close(
        merge("dare_ties", models, density=1.0, normalize=True), merge("ties", models, density=1.0, normalize=True)
    )
    torch.testing.assert_close(merge("dare_ties", models, density=1.0), merge("ties", models, density=1.0, normalize=False))


def test_drop_masks_are_drawn_in_model_order() -> None:
    """Contract: each model has its own mask, and further models do not change the first one's."""
    ones = torch.ones(1000)
    params = bound("dare", 2, density=0.5, rescale="none")
    both = drop_at_random(torch.stack([ones, ones]), params, tensor_generator(0, "dare", "w"))
    alone = drop_at_random(ones.unsqueeze(0), params, tensor_generator(0, "dare", "w"))
    assert torch.equal(both[0], alone[0])
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(alone[0], drop_at_random(ones.unsqueeze(0), params, tensor_generator(0, "dare", "v"))[0])
