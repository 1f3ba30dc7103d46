from pathlib import Path

import pytest
import torch

from stages.merging import diagnostics
from stages.merging.diagnostics import layer_group, measure, relative_distance

from .helpers import write_folder


@pytest.mark.parametrize("piece", [diagnostics.PIECE, 1])
def test_diagnostics_by_hand(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: changed fractions, overlap, sign agreement, cosine and histogram of three task vectors, by hand; the same however
    large the pieces are that are measured at once."""
    monkeypatch.setattr(diagnostics, "PIECE", piece)
    first = {"model.layers.0.mlp.w": [0.4, 0.0, 0.2], "lm_head.weight": [0.0, 0.1, 0.0]}
    second = {"model.layers.0.mlp.w": [0.2, 0.6, 0.0], "lm_head.weight": [0.0, -0.3, 0.0]}
    third = {"model.layers.0.mlp.w": [0.0, 0.0, 0.0], "lm_head.weight": [0.0, 0.5, 5e-6]}
    zero = {name: [0.0] * 3 for name in first}
    paths = [
        write_folder(tmp_path / str(i), {name: torch.tensor(values) for name, values in tensors.items()})
        for i, tensors in enumerate([first, second, third, zero])
    ]
    found = measure(["a", "b", "c"], paths[:3], paths[3], eps=[1e-5] * 3)
    assert (found["entries"], found["histogram"]) == (6, [2, 2, 1, 1])
    assert found["models"]["a"]["changed_fraction"] == pytest.approx(0.5)
    assert found["models"]["a"]["unique_fraction"] == pytest.approx(1 / 3)
    assert found["models"]["a"]["sparsity"] == pytest.approx(0.5)
    assert found["models"]["a"]["norm"] == pytest.approx((0.16 + 0.04 + 0.01) ** 0.5)
    assert found["models"]["c"]["sparsity"] == pytest.approx(4 / 6)
    assert found["models"]["c"]["changed_fraction"] == pytest.approx(1 / 6)
    assert found["models"]["c"]["changed_by_eps"]["1e-06"] == pytest.approx(2 / 6)
    pair = found["pairs"][0]
    assert (pair["a"], pair["b"], pair["overlap"]) == ("a", "b", 2)
    assert pair["jaccard"] == pytest.approx(2 / 4)
    assert pair["sign_agreement"] == pytest.approx(0.5)
    assert pair["cosine"] == pytest.approx((0.08 - 0.03) / (0.21 * 0.49) ** 0.5)
    groups = {row["group"]: row for row in found["groups"]}
    assert groups["layers.0.mlp"]["changed_fraction"]["b"] == pytest.approx(2 / 3)
    assert groups["lm_head"]["shared_fraction"] == pytest.approx(1 / 3)


def test_ratios_of_unchanged_model_are_null(tmp_path: Path) -> None:
    """Contract: ratios without a denominator are null, so the report is valid JSON."""
    paths = [write_folder(tmp_path / name, {"w": torch.ones(2)}) for name in ("a", "b", "base")]
    found = measure(["a", "b"], paths[:2], paths[2], eps=[1e-5] * 2)
    pair = found["pairs"][0]
    assert (pair["jaccard"], pair["sign_agreement"], pair["cosine"]) == (None, None, None)
    assert found["models"]["a"]["unique_fraction"] is None


@pytest.mark.parametrize("piece", [diagnostics.PIECE, 1])
def test_relative_distance(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: |a - b| / |b - base|; null where b is the base."""
    monkeypatch.setattr(diagnostics, "PIECE", piece)
    values = {"a": [4.0, 0.0], "b": [1.0, 4.0], "base": [1.0, 1.0]}
    paths = {name: write_folder(tmp_path / name, {"w": torch.tensor(value)}) for name, value in values.items()}
    assert relative_distance(paths["a"], paths["b"], paths["base"]) == pytest.approx(5.0 / 3.0)
    assert relative_distance(paths["a"], paths["base"], paths["base"]) is None


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "layers.3.self_attn"),
        ("model.layers.3.input_layernorm.weight", "layers.3.norm"),
        ("transformer.h.0.mlp.c_fc.weight", "h.0.mlp"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_layer_groups(name: str, group: str) -> None:
    """Contract: tensors are grouped by layer and module."""
    assert layer_group(name) == group
