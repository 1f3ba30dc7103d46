"""Small tensors and folders for the merging tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors.torch import save_file
from torch import Tensor

from stages.merging.contract import MergeParams
from stages.merging.registry import bind, get_merger, shipped
from stages.merging.streaming import tensor_generator

TENSORWISE = [name for name in shipped() if not get_merger(name).trains]


def bound(method: str, count: int, **changes: Any) -> MergeParams:
    """Parameters of `method` for `count` models of weight 1."""
    weights = changes.pop("weights", (1.0,) * count)
    given = {key: value.model_dump() if isinstance(value, BaseModel) else value for key, value in changes.items()}
    return bind(method, weights, given)


def merge(method: str, models: Sequence[Any], base: Any = None, seed: int = 0, name: str = "x", **changes: Any) -> Tensor:
    """Merge one tensor with `method`, passes for statistics included; the base is 0 unless given."""
    tensors = [torch.as_tensor(model, dtype=torch.float32) for model in models]
    origin = torch.zeros_like(tensors[0]) if base is None else torch.as_tensor(base, dtype=torch.float32)
    layers = changes.pop("layers", 1)
    merger, params = get_merger(method), replace(bound(method, len(tensors), **changes), layers=layers)
    totals = merger.scan(name, origin, tensors, params)
    if totals is not None and merger.scans_again(params):
        totals = {**totals, **(merger.scan_again(name, origin, tensors, params, totals) or {})}
    return merger.merge_tensor(name, origin, tensors, params, tensor_generator(seed, method, name), totals)


def random_tensors(seed: int, shapes: dict[str, tuple[int, ...]], scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


def write_folder(path: Path, tensors: dict[str, Tensor], shards: int = 1, config: dict[str, Any] | None = None) -> Path:
    """Write a model folder: one file, or `shards` files with an index."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    names = list(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
