"""Writes a model folder tensor by tensor; headers are computed beforehand, so no shard is held in memory."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

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


Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`function` of the items, in order, computed by `workers` threads at most one item each ahead."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                if len(waiting) > workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def write_at(handle: int, offset: int, piece: Tensor) -> int:
    """Write the tensor's bytes at `offset` of a file and return the offset of their end."""
    left = piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
    while left:
        written = os.pwrite(handle, left, offset)
        left, offset = left[written:], offset + written
    return offset


def write_weights(
    partial: Path,
    shards: list[list[OutputTensor]],
    produce: Callable[[OutputTensor], Iterable[Tensor]],
    workers: int,
    written: Callable[[], None],
) -> None:
    """Write the shards and the index. `produce` makes a tensor in pieces of the planned dtype, in `workers` threads, a tensor
    each at a time; `written` is called after each tensor."""
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        with (partial / file).open("wb", buffering=0) as handle:
            begin = handle.write(header(shard))

            def write(at: tuple[OutputTensor, int], to: int = handle.fileno()) -> None:
                planned, offset = at
                end = offset + planned.bytes
                for piece in produce(planned):
                    offset = write_at(to, offset, piece)
                assert offset == end, f"tensor {planned.name} was made in another shape or dtype"

            sizes = [begin, *(planned.bytes for planned in shard)]
            for _ in in_threads(write, zip(shard, accumulate(sizes), strict=False), workers):
                written()
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
