import pytest
import torch

from stages.merging.contract import MergeError
from stages.merging.registry import get_merger
from stages.merging.streaming import tensor_generator

from .helpers import bound, merge


def test_task_arithmetic_adds_weighted_deltas_to_the_base() -> None:
    """Contract: theta_0 + lam sum w_i t_i, by hand."""
    got = merge("task_arithmetic", [[2.0, 1.0], [1.0, 3.0]], base=[1.0, 1.0], weights=(1.0, 0.5), lam=2.0)
    torch.testing.assert_close(got, torch.tensor([3.0, 3.0]))


def test_task_arithmetic_normalised_equals_linear() -> None:
    """Contract: with normalize true and lam 1 task arithmetic reduces to linear."""
    generator = torch.Generator().manual_seed(1)
    base, *models = torch.randn(4, 5, 6, generator=generator)
    weights = (1.0, 2.0, 0.5)
    got = merge("task_arithmetic", models, base=base, weights=weights, normalize=True)
    torch.testing.assert_close(got, merge("linear", models, base=base, weights=weights))


def test_delta_method_without_base_is_rejected() -> None:
    """Contract: without a base, the error of a method on deltas names the tensor and the key."""
    with pytest.raises(MergeError, match=r"tensor w.*merge\.base"):
        get_merger("task_arithmetic").merge_tensor(
            "w", None, [torch.ones(2)], bound("task_arithmetic", 1), tensor_generator(0, "task_arithmetic", "w"), None
        )
