"""stages.agent.upcast_linear: a frozen layer of lower precision in float32."""

from __future__ import annotations

import pytest
import torch
from device import DEVICE
from torch.nn import functional

from stages.agent.upcast_linear import SLICE, _mixed_product, multiplies_mixed, upcast_linear


@pytest.mark.parametrize("with_bias", [False, True])
def test_slices_equal_a_converted_copy(with_bias):
    """Values and gradients are those of the layer with all its weights in float32, also where the last slice is shorter."""
    generator = torch.Generator().manual_seed(0)
    outputs = 2 * SLICE["cpu"] + 3
    weight = torch.randn(outputs, 16, generator=generator).to(torch.bfloat16)
    bias = torch.randn(outputs, generator=generator).to(torch.bfloat16) if with_bias else None
    inputs = torch.randn(2, 3, 16, generator=generator)
    found, expected = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    ours = upcast_linear(found, weight, bias)
    theirs = functional.linear(expected, weight.float(), None if bias is None else bias.float())
    assert ours.shape == (2, 3, outputs)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-5)
    slope = torch.randn(2, 3, outputs, generator=generator)
    ours.backward(slope)
    theirs.backward(slope)
    assert found.grad is not None
    assert torch.allclose(found.grad, expected.grad, rtol=1e-5, atol=1e-3)


def test_mixed_products_are_wired_as_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients by the products of a GPU, here with a CPU's float32 product in their place."""
    plain = torch.mm

    def mixed(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        assert left.dtype == right.dtype == torch.bfloat16
        return plain(left.to(out_dtype), right.to(out_dtype))

    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, generator=generator).to(torch.bfloat16) for shape in ((40, 16), (40,)))
    inputs, slope = (torch.randn(2, 3, size, generator=generator) for size in (16, 40))
    found = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr("stages.agent.upcast_linear.multiplies_mixed", lambda device: True)
            monkeypatch.setattr(torch, "mm", mixed)
        given = inputs.clone().requires_grad_()
        output = upcast_linear(given, weight, bias)
        output.backward(slope)
        found.append((output.detach(), given.grad))
    for sliced, product in zip(*found, strict=True):
        torch.testing.assert_close(product, sliced, atol=2e-4, rtol=2e-5)


def test_trained_weights_are_refused():
    weight = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="load the model in float32"):
        upcast_linear(torch.zeros(1, 2, requires_grad=True), weight, None)


@pytest.mark.skipif(not multiplies_mixed(DEVICE), reason=f"{DEVICE} does not multiply bfloat16 into float32 here")
def test_mixed_products_are_nearly_those_in_float32():
    """Inputs that were bfloat16 lose nothing but the order of sums; others at most 2^-17 of their value."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator).to(torch.bfloat16).to(DEVICE)
    inputs = torch.randn(48, 64, generator=generator).to(DEVICE)
    for rows, bound in ((inputs.bfloat16().float(), 1e-6), (inputs, 2.0**-17 + 1e-6)):
        expected = rows.double() @ weight.double()
        scale = rows.double().abs() @ weight.double().abs()
        assert bool(((_mixed_product(rows, weight) - expected).abs() <= bound * scale).all())
