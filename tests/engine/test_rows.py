"""The processor's matrix products: a row's result does not depend on the number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from architectures import make
from torch import Tensor

from stages.engine import self_check
from stages.engine.self_check import BOUND, COUNTS, rows_that_differ, tolerance, warn_of_bfloat16
from stages.engine.slots import LEAST_ROWS
from stages.engine.torch_engine import TorchEngine


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    cached = (rows_that_differ, warn_of_bfloat16)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize("shape", [(160, 160), (512, 160), (160, 512), (894, 160)])
def test_products_do_not_depend_on_the_number_of_rows(shape: tuple[int, int]) -> None:
    """Contract: here, and in continuous integration, the promise about resources.workers holds for the shipped model's shapes."""
    torch.set_num_threads(1)
    assert rows_that_differ(*shape, torch.float32) == ()


def test_a_processor_whose_sums_depend_on_the_number_of_rows_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_order(rows: Tensor, weight: Tensor) -> Tensor:
        return (rows * (1 + 1e-6 * (len(rows) > LEAST_ROWS))) @ weight.T

    monkeypatch.setattr(self_check, "linear", other_order)
    assert rows_that_differ(8, 64, torch.float32) == COUNTS
    TorchEngine(make("llama"), [], slots=4, max_length=64)
    error = capsys.readouterr().err
    assert f"products of {LEAST_ROWS} rows with a" in error
    assert "results will depend on resources.workers" in error


@pytest.mark.parametrize("supported", ["_is_avx512_bf16_supported", "_is_amx_tile_supported", None])
def test_a_processor_without_bfloat16_is_named(
    supported: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: where bfloat16 has no instructions, which costs speed, a run in it says so once; one in float32 does not."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name == supported)
    TorchEngine(make("llama"), [], slots=4, max_length=64)
    assert "bfloat16" not in capsys.readouterr().err
    for _ in range(2):
        TorchEngine(make("llama").bfloat16(), [], slots=4, max_length=64)
    assert capsys.readouterr().err.count("set resources.precision to float32") == (0 if supported else 1)


def test_tf32_on_a_gpu_is_no_difference_between_forward_passes() -> None:
    """Contract: with TF32, whose mantissa is float16's, a model on a GPU is held to float16's bound; on a CPU nothing changes."""
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            found += [tolerance(SimpleNamespace(dtype=torch.float32, device=torch.device(name))) for name in ("cpu", "cuda")]
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == [BOUND[torch.float32]] * 3 + [BOUND[torch.float16]]
