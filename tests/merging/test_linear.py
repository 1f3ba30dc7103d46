import torch

from .helpers import merge


def test_linear_is_the_weighted_mean_unless_normalize_is_off() -> None:
    """Contract: linear = sum w_i theta_i / sum w_i; a plain sum without normalisation; the base is not used."""
    models = [[1.0, 4.0], [3.0, 0.0]]
    assert merge("linear", models, base=[9.0, 9.0]).tolist() == [2.0, 2.0]
    torch.testing.assert_close(merge("linear", models, weights=(3.0, 1.0)), torch.tensor([1.5, 3.0]))
    torch.testing.assert_close(merge("linear", models, weights=(2.0, 1.0), normalize=False), torch.tensor([5.0, 8.0]))


def test_linear_of_one_model_is_that_model_bit_for_bit() -> None:
    """Contract: one model, whatever its weight, comes out unchanged."""
    model = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(merge("linear", [model], weights=(0.3,)), model)
