"""Merges model folders tensor by tensor, in at most three passes; each worker has one tensor in memory at a time.

Every tensor's random generator is keyed by (seed, method, tensor name), so the output depends neither on the order of the tensors
nor on the sharding of the inputs nor on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from stages.merging.contract import MergeError, MergeParams
from stages.merging.folders import TensorFolder, check_same_tensors, check_same_vocabulary, open_folder
from stages.merging.layers import layer_index
from stages.merging.registry import get_merger
from stages.merging.writer import OutputTensor, copy_companions, in_threads, plan_shards, write_weights
from stages.runtime.files import atomic_folder
from stages.runtime.progress import Progress
from stages.seeding import key64

OutDtype = Literal["float32", "bfloat16"]
_STORED = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16)}
ProgressFactory = Callable[[str, int, str], AbstractContextManager[Progress]]


class _Silent(Progress):
    def _show(self, count: int, note: str) -> None:
        """Shows nothing."""


@contextmanager
def silent(label: str, total: int, unit: str) -> Iterator[Progress]:
    """A progress bar that shows nothing, for callers without a terminal."""
    yield _Silent(label, total, unit)


@dataclass(frozen=True)
class MergeResult:
    tensors: int
    entries: int
    totals: Mapping[str, Any] | None
    """Sums of the passes for statistics; None for methods of one pass."""


@dataclass(frozen=True)
class Inputs:
    """The opened folders of a merge, checked against each other; `names` sorted."""

    models: Sequence[TensorFolder]
    base: TensorFolder | None
    names: list[str]
    _reading: Lock = field(default_factory=Lock)

    @classmethod
    def open(cls, models: Sequence[Path], base: Path | None) -> Inputs:
        """Open and check. Raises MergeError for damaged folders and for names, shapes or vocabularies that differ."""
        folders = [open_folder(path) for path in models]
        origin = open_folder(base) if base is not None else None
        all_folders = [*folders, *([origin] if origin else [])]
        check_same_vocabulary(all_folders)
        return cls(folders, origin, check_same_tensors(all_folders))

    def load(self, name: str) -> tuple[Tensor | None, list[Tensor]]:
        """(base, models) of one tensor, in their stored dtypes."""
        with self._reading:
            return (self.base.tensor(name) if self.base else None), [folder.tensor(name) for folder in self.models]

    def mergeable(self) -> list[str]:
        """Names of the floating-point tensors."""
        return [name for name in self.names if self.models[0].infos[name].mergeable]

    def close(self) -> None:
        for folder in [*self.models, *([self.base] if self.base else [])]:
            folder.close()


def tensor_generator(seed: int, method: str, name: str) -> torch.Generator:
    """The CPU generator of one tensor."""
    return torch.Generator().manual_seed(key64("merge", seed, method, name) % 2**63)


def _summed(
    scan: Callable[[str], Mapping[str, Any] | None], names: Sequence[str], workers: int, progress: ProgressFactory
) -> dict[str, Any] | None:
    """Sums of a pass over all tensors, in order; None if the method has no such pass."""
    totals: dict[str, Any] | None = None
    with progress("scan", len(names), "tensor") as bar:
        for found in in_threads(scan, names, workers):
            if found is None:
                return None
            totals = {key: totals[key] + value for key, value in found.items()} if totals is not None else dict(found)
            bar.advance()
    return totals


def scan_totals(
    method: str, inputs: Inputs, params: MergeParams, workers: int = 1, progress: ProgressFactory = silent
) -> dict[str, Any] | None:
    """The method's statistics, summed over all tensors in one pass or two; None if it has none."""
    merger, names = get_merger(method), inputs.mergeable()
    first = _summed(lambda name: merger.scan(name, *inputs.load(name), params), names, workers, progress)
    if first is None or not merger.scans_again(params):
        return first
    again = _summed(lambda name: merger.scan_again(name, *inputs.load(name), params, first), names, workers, progress)
    return {**first, **(again or {})}


def copied_buffer(name: str, base: Tensor | None, models: Sequence[Tensor]) -> Tensor:
    """A non-float tensor, from the base (else the first model). Raises MergeError for quantised weights that differ."""
    source = models[0] if base is None else base
    if source.dim() >= 2 and any(not torch.equal(source, model) for model in models):
        raise MergeError(
            f"tensor {name} has {source.dtype} values that differ between the models; quantised weights cannot be merged, "
            "merge the models before quantisation"
        )
    return source


def is_finite(piece: Tensor) -> bool:
    # A finite sum, of one pass over the values, needs finite values; another may have overflowed.
    return math.isfinite(float(piece.sum())) or bool(torch.isfinite(piece).all())


def merged_pieces(
    method: str, inputs: Inputs, name: str, params: MergeParams, seed: int, totals: Mapping[str, Any] | None
) -> Iterator[Tensor]:
    """One tensor of the last pass, in consecutive pieces: float32, or a buffer's own dtype. Raises MergeError if it is not
    finite."""
    base, models = inputs.load(name)
    if not inputs.models[0].infos[name].mergeable:
        yield copied_buffer(name, base, models)
        return
    for piece in get_merger(method).merge_in_pieces(name, base, models, params, tensor_generator(seed, method, name), totals):
        if not is_finite(piece):
            raise MergeError(f"tensor {name} is not finite after merging; one of the models has NaN or infinity in it")
        yield piece


def _check_call(method: str, models: Sequence[Path], base: Path | None, out: Path, params: MergeParams) -> None:
    if get_merger(method).trains:
        raise MergeError(f"merge.method {method} trains a policy on episodes; run it as the stage merge")
    if get_merger(method).needs_base and base is None:
        raise MergeError(f"merge.method {method} needs a base model to take deltas against (merge.base)")
    if len(params.weights) != len(models) or not models:
        raise MergeError(f"{len(models)} models and {len(params.weights)} weights were given; each model needs one weight")
    if out.resolve() in {path.resolve() for path in [*models, *([base] if base else [])]}:
        raise MergeError(f"{out} is one of the inputs; choose another output folder")


def merge_folders(
    method: str,
    models: Sequence[Path],
    base: Path | None,
    out: Path,
    params: MergeParams,
    *,
    seed: int,
    out_dtype: OutDtype = "float32",
    shard_bytes: int = 5_000_000_000,
    workers: int = 1,
    progress: ProgressFactory = silent,
) -> MergeResult:
    """Merge the folders `models`, in this order, into `out`, a `save_pretrained` folder. A LoRA adapter folder is merged as its
    base with the adapter applied.

    `base`: what deltas are taken against, for methods with `needs_base`. `params`: from `registry.bind`. Config, tokenizer and
    chat template are the first model's. `workers` threads share the tensors. `out` is created atomically. Raises MergeError for
    incompatible inputs.
    """
    _check_call(method, models, base, out, params)
    inputs = Inputs.open(models, base)
    layers = [index for index in map(layer_index, inputs.names) if index is not None]
    params = replace(params, layers=max(layers, default=0) + 1)
    totals = scan_totals(method, inputs, params, workers, progress)
    stored, dtype = _STORED[out_dtype]
    infos = inputs.models[0].infos
    planned = [
        OutputTensor(name, stored if infos[name].mergeable else infos[name].dtype, infos[name].shape) for name in inputs.names
    ]
    shards = plan_shards(planned, shard_bytes)
    with atomic_folder(out) as partial, progress(f"merge by {method}", len(planned), "tensor") as bar:

        def produce(tensor: OutputTensor) -> Iterator[Tensor]:
            for piece in merged_pieces(method, inputs, tensor.name, params, seed, totals):
                yield piece.to(dtype) if infos[tensor.name].mergeable else piece

        write_weights(partial, shards, produce, workers, bar.advance)
        copy_companions(inputs.models[0].sources, partial, inputs.models[0].config, out_dtype)
    inputs.close()
    return MergeResult(len(planned), sum(infos[name].entries for name in inputs.names), totals)
