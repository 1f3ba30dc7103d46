"""Products with weights in training: oneDNN's equal PyTorch's up to rounding, and others are PyTorch's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from architectures import make
from torch import Tensor, nn
from torch.nn import functional

from stages.agent.logprobs import predicting_states
from stages.agent.shared_prefixes import sharing_states
from stages.engine import products
from stages.engine.low_rank import is_plain
from stages.engine.products import FastLinear, product, use_products

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this build of PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """oneDNN on any processor."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: HAS_ONEDNN)
    return


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_onednn
@pytest.mark.parametrize("shape", [(5, 24), (1, 24), (2, 3, 24), (129, 24), (700, 24)])
@pytest.mark.parametrize("outputs", [7, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_those_of_pytorch(shape: tuple[int, ...], outputs: int, biased: bool) -> None:
    weight, bias = numbers(outputs, 24, seed=1), numbers(outputs, seed=2) if biased else None
    found = []
    for multiply in (product, functional.linear):
        factors = [one.clone().requires_grad_() for one in (numbers(*shape), weight, *([] if bias is None else [bias]))]
        result = multiply(*factors)
        result.backward(numbers(*result.shape, seed=3))
        found.append([result.detach(), *(factor.grad for factor in factors)])
    for ours, expected in zip(*found, strict=True):
        assert ours is not None
        assert expected is not None
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)


@needs_onednn
def test_only_what_is_trained_gets_a_gradient() -> None:
    inputs, weight = numbers(6, 8).requires_grad_(), numbers(4, 8)
    product(inputs, weight).sum().backward()
    torch.testing.assert_close(inputs.grad, weight.sum(0).expand(6, 8))
    assert weight.grad is None


@needs_onednn
def test_gradients_that_are_expanded_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum's has strides of 0, with which oneDNN takes a thousand times as long."""
    multiply, factors = products._multiply, []
    monkeypatch.setattr(products, "_multiply", lambda *tensors: factors.extend(tensors[:2]) or multiply(*tensors))
    inputs, weight = numbers(6, 8).requires_grad_(), numbers(4, 8).requires_grad_()
    product(inputs, weight).sum().backward()
    assert len(factors) == 6
    assert all(0 not in factor.stride() for factor in factors)


@needs_onednn
def test_a_pass_over_rows_that_share_prefixes_fills_them_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    use_products(model)
    ids = torch.arange(70).remainder(50).repeat(3, 1)
    ids[1:, 40:] += torch.tensor([[3], [7]])
    mask = torch.arange(70) > torch.tensor([[20], [45], [66]])
    expected = predicting_states(model, ids, mask)
    padded, given = products._padded, []
    monkeypatch.setattr(products, "_padded", lambda rows: given.append(len(rows)) or padded(rows))
    torch.testing.assert_close(sharing_states(model, ids, mask), expected, atol=1e-5, rtol=1e-4)
    of_indices, of_states = given[:3], given[3:]
    assert any(products._missing(count) for count in of_indices)
    assert of_states
    assert not any(map(products._missing, of_states))


@needs_onednn
def test_shapes_are_few() -> None:
    """A kernel is compiled for each."""
    assert len({count + products._missing(count) for count in range(1, 4097)}) == 8 + 28
    assert all(0 <= products._missing(count) < 128 for count in range(1, 4097))


def test_other_products_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows, lower precision, autocast, no gradients."""
    weight = numbers(4, 8)
    assert product(numbers(0, 8), weight).shape == (0, 4)
    half, low = numbers(6, 8).bfloat16(), weight.bfloat16()
    assert torch.equal(product(half, low), functional.linear(half, low))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product(numbers(6, 8), weight).dtype == torch.bfloat16
    monkeypatch.setattr(products, "_multiply", lambda *_: pytest.fail("oneDNN was called"))
    with torch.no_grad():
        assert torch.equal(product(numbers(6, 8), weight), functional.linear(numbers(6, 8), weight))


@needs_onednn
def test_what_losses_compare_is_multiplied_alike() -> None:
    rows, weight = numbers(70, 24), numbers(40, 24, seed=1)
    trained = product(rows, weight.requires_grad_())
    with torch.no_grad(), products.as_in_training():
        assert torch.equal(product(rows, weight), trained)


def test_other_processors_keep_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    monkeypatch.setattr(products, "_multiply", lambda *_: pytest.fail("oneDNN was called"))
    inputs, weight = numbers(6, 8), numbers(4, 8)
    assert torch.equal(product(inputs, weight), functional.linear(inputs, weight))


def test_a_model_keeps_its_weights_and_its_kind() -> None:
    """Names, ties and copies stay; engine and adapters take its layers for plain ones; others are not touched."""

    class Special(nn.Linear):
        pass

    model = make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.special = Special(2, 2)
    use_products(model)
    assert type(model.special) is Special
    del model.special
    layer = model.base_model.layers[0].mlp.up_proj
    assert type(layer) is FastLinear
    assert is_plain(layer)
    assert type(copy.deepcopy(model).base_model.layers[0].mlp.up_proj) is FastLinear
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
