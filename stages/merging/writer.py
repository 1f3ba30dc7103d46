"""Writes a model folder tensor by tensor; headers are computed beforehand, so no shard is held in memory."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.merging.folders import INDEX, SINGLE

# Copied beside the weights; other files of a training folder are not.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4}
BYTES |= {"I64": 8, "U64": 8, "F64": 8}


@dataclass(frozen=True)
class OutputTensor:
    name: str
    dtype: str
    """As safetensors names it, e.g. "F32"."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return BYTES[self.dtype] * math.prod(self.shape)


def plan_shards(tensors: list[OutputTensor], shard_bytes: int) -> list[list[OutputTensor]]:
    """Tensors by name in shards of at most `shard_bytes` (a larger tensor gets its own shard). In a shard, wider dtypes come
    first, as in files written by safetensors, so that every tensor is aligned."""
    shards: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in sorted(tensors, key=lambda item: item.name):
        if shards[-1] and size + tensor.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return [sorted(shard, key=lambda item: (-BYTES[item.dtype], item.name)) for shard in shards]


def header(shard: list[OutputTensor]) -> bytes:
    """The safetensors header: 8 bytes of length, then JSON padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_weights(partial: Path, shards: list[list[OutputTensor]], produce: Callable[[OutputTensor], Tensor]) -> None:
    """Write the shards, calling `produce` for one tensor at a time (of the planned dtype and shape), and the index."""
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        with (partial / file).open("wb") as handle:
            handle.write(header(shard))
            for planned in shard:
                handle.write(produce(planned).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.bytes for shard in shards for tensor in shard)},
            "weight_map": {tensor.name: file for file, shard in zip(names, shards, strict=True) for tensor in shard},
        }
        (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_companions(sources: Sequence[Path], partial: Path, config: Mapping[str, Any], dtype: str) -> None:
    """Copy config (with its dtype set to `dtype`, e.g. "float32"), tokenizer, chat template and generation config, each from the
    last of `sources` that has it."""
    for source in sources:
        for name in COMPANIONS:
            if (source / name).exists():
                shutil.copyfile(source / name, partial / name)
    if config:
        values = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")} | {"dtype": dtype}
        (partial / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
