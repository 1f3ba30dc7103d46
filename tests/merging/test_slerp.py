import pytest
import torch

from stages.merging.layers import layer_index
from stages.merging.methods.slerp import SlerpOptions as Slerp
from stages.merging.methods.slerp import at_depth

from .helpers import merge


@pytest.mark.parametrize(
    ("first", "second", "t", "expected"),
    [
        ([1.0, 0.0], [0.0, 1.0], 0.5, [0.7071, 0.7071]),
        ([1.0, 0.0], [0.0, 1.0], 0.25, [0.9239, 0.3827]),
        ([2.0, 0.0], [0.0, 1.0], 0.5, [1.4142, 0.7071]),
        ([1.0, 2.0], [-1.0, -2.0], 0.5, [0.0, 0.0]),
        ([1.0, 2.0], [1.0, 2.0], 0.3, [1.0, 2.0]),
        ([0.0, 0.0], [1.0, 2.0], 0.5, [0.5, 1.0]),
    ],
)
def test_slerp_by_hand(first: list[float], second: list[float], t: float, expected: list[float]) -> None:
    """Contract: hand-computed; antipodal, parallel and zero tensors are interpolated linearly, without NaN."""
    got = merge("slerp", [first, second], slerp=Slerp(t=t))
    torch.testing.assert_close(got, torch.tensor(expected), atol=5e-5, rtol=0)


@pytest.mark.parametrize(("t", "which"), [(0.0, 0), (1.0, 1)])
def test_slerp_end_points_are_the_models(t: float, which: int) -> None:
    """Contract: t = 0 gives the first model, t = 1 the second."""
    models = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(merge("slerp", list(models), slerp=Slerp(t=t)), models[which])


def test_gradient_interpolates_over_layer_depth() -> None:
    """Contract: a list of values is interpolated at layer/(layers - 1); tensors outside the layers take the first value."""
    assert at_depth([1.0, 0.7, 0.1], 0.5) == pytest.approx(0.7)
    assert at_depth([1.0, 0.7, 0.1], 0.25) == pytest.approx(0.85)
    assert at_depth([1.0, 0.7, 0.1], 1.0) == pytest.approx(0.1)
    assert (layer_index("model.layers.12.mlp.up_proj.weight"), layer_index("lm_head.weight")) == (12, None)
    models, gradient = [[1.0, 0.0], [0.0, 1.0]], Slerp(gradient=[0.0, 1.0])
    for name, expected in [("model.layers.0.w", [1.0, 0.0]), ("model.layers.2.w", [0.0, 1.0]), ("lm_head.weight", [1.0, 0.0])]:
        got = merge("slerp", models, name=name, slerp=gradient, layers=3)
        torch.testing.assert_close(got, torch.tensor(expected), atol=1e-6, rtol=0)


def test_equal_tensors_stay_at_the_largest_threshold() -> None:
    same = [3.0, 4.0]
    assert merge("slerp", [same, same], slerp=Slerp(t=0.3, dot_threshold=1.0)).tolist() == same
