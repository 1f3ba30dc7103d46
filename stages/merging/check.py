"""Checks that a merge method fulfils its contract (contract.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from stages.merging.contract import MergeError, Merger
from stages.merging.registry import bind, get_merger
from stages.records.card import Card
from stages.runtime.checking import Findings, expect
from stages.runtime.validation import ParamsError, Section

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = ((), (5,), (4, 3), (0, 2))
"""Shapes of the test tensors."""


def check(name: str, found: Findings) -> None:
    """Raises ParamsError for an unknown name, and for a class that is not a merger."""
    try:
        merger = get_merger(name)
    except MergeError as error:
        raise ParamsError(str(error)) from error
    kind = type(merger)
    found.check("card: complete, its slug the method's name", kind, lambda: _card(name, merger))
    if found.check("Settings: a Section whose defaults are valid", kind, lambda: _settings(name, merger)) is None:
        return
    call = merger.merge_tensor
    merged = found.check("merge_tensor: float32, finite, of its inputs' shape", call, lambda: _merge(name, merger))
    if merged is not None:
        found.check("merge_tensor: deterministic, inputs unchanged", call, lambda: _same(merged, _merge(name, merger)))
        found.check("scan: None, or sums that add up over tensors", merger.scan, lambda: _scans(name, merger))
        found.check("copies of the base merge to the base", call, lambda: _unchanged(name, merger))


def _card(name: str, merger: Merger) -> None:
    expect(isinstance(merger.card, Card), "`card` must be a stages.plugins.Card")
    empty = [field.name for field in fields(merger.card) if not getattr(merger.card, field.name)]
    expect(not empty, f"the card lacks {', '.join(empty)}")
    expect(merger.card.slug == name, f"its slug is {merger.card.slug!r}; set it to the entry point's name, {name!r}")


def _settings(name: str, merger: Merger) -> Any:
    expect(
        isinstance(merger.Settings, type) and issubclass(merger.Settings, Section), "make it a subclass of stages.plugins.Section"
    )
    try:
        merger.Settings(no_such_key=1)  # type: ignore[call-arg]
    except ValueError:
        return bind(name, (1.0, 1.0))
    expect(False, "it accepts unknown keys; keep `extra` forbidden")


def _tensors(shape: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    base, *models = [torch.randn(shape, generator=generator) for _ in range(3)]
    return base, models


def _totals(merger: Merger, params: Any) -> Any:
    totals = None
    for shape in SHAPES:
        base, models = _tensors(shape)
        scanned = merger.scan(str(shape), base, models, params)
        if scanned is not None:
            totals = {key: totals[key] + value for key, value in scanned.items()} if totals else dict(scanned)
    return totals


def _merge(name: str, merger: Merger) -> list[Tensor]:
    import torch

    from stages.merging.streaming import tensor_generator

    params, merged = bind(name, (1.0, 1.0)), []
    totals = _totals(merger, params)
    for shape in SHAPES:
        base, models = _tensors(shape)
        inputs = [base, *models]
        copies = [tensor.clone() for tensor in inputs]
        tensor = merger.merge_tensor(str(shape), base, models, params, tensor_generator(0, name, str(shape)), totals)
        expect(isinstance(tensor, torch.Tensor), f"it returned {type(tensor).__name__}, not a tensor")
        expect(tensor.shape == base.shape, f"it returned shape {list(tensor.shape)} for inputs of shape {list(shape)}")
        expect(tensor.dtype == torch.float32, f"it returned {tensor.dtype}; merge in float32")
        expect(bool(tensor.isfinite().all()), f"it returned NaN or infinity for shape {list(shape)}")
        expect(all(torch.equal(*pair) for pair in zip(copies, inputs, strict=True)), "it changed its inputs; copy them first")
        merged.append(tensor)
    return merged


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    equal = all(one.equal(two) for one, two in zip(first, second, strict=True))
    expect(equal, "a second call gives different values; draw random numbers from `rng` only")


def _scans(name: str, merger: Merger) -> None:
    params = bind(name, (1.0, 1.0))
    base, models = _tensors((4, 3))
    scanned = merger.scan("x", base, models, params)
    expect(scanned is None or hasattr(scanned, "items"), f"it returned {type(scanned).__name__}; return None or a mapping")
    for key, value in (scanned or {}).items():
        expect(hasattr(value, "__add__"), f"totals[{key!r}] can't be added up")


def _unchanged(name: str, merger: Merger) -> None:
    import torch

    from stages.merging.streaming import tensor_generator

    params = bind(name, (1.0, 1.0))
    base, _ = _tensors((4, 3))
    totals = merger.scan("x", base, [base, base], params)
    merged = merger.merge_tensor("x", base, [base.clone(), base.clone()], params, tensor_generator(0, name, "x"), totals)
    expect(torch.allclose(merged, base, atol=1e-5), "two copies of the base do not merge to the base")
