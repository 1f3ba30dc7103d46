import json
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.merging import contract, streaming
from stages.merging.contract import MergeError, Merger
from stages.merging.folders import TensorFolder
from stages.merging.methods.ram import RamOptions as Ram
from stages.merging.methods.ties import TiesOptions as Ties
from stages.merging.registry import LOADED
from stages.merging.streaming import merge_folders
from stages.runtime.validation import Section

from .helpers import TENSORWISE, bound, random_tensors, write_folder

SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.mlp.weight": (4, 6),
    "model.layers.1.mlp.weight": (4, 6),
    "model.norm.weight": (4,),
    "lm_head.weight": (8, 4),
}


def folders(root: Path, count: int = 2, shards: int = 1, reverse: bool = False) -> tuple[Path, list[Path]]:
    """A base and `count` models with partly zero deltas; the values are always the same."""
    base = random_tensors(0, SHAPES)
    models = []
    for model in range(count):
        deltas = random_tensors(model + 1, SHAPES, scale=0.1)
        models.append({name: base[name] + delta * (delta > 0) for name, delta in deltas.items()})

    def ordered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(reversed(list(tensors.items()))) if reverse else tensors

    paths = [write_folder(root / f"m{index}", ordered(tensors), shards) for index, tensors in enumerate(models)]
    return write_folder(root / "base", ordered(base), shards), paths


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("method", TENSORWISE)
def test_output_bytes_are_independent_of_input_order_and_shards(tmp_path: Path, method: str) -> None:
    """Contract: the same tensors give the same bytes however the inputs are ordered and sharded, random methods included."""
    written = []
    for case, (shards, reverse) in enumerate([(1, False), (3, False), (2, True)]):
        base, models = folders(tmp_path / str(case), shards=shards, reverse=reverse)
        out = tmp_path / str(case) / "out"
        merge_folders(method, models, base, out, bound(method, 2), seed=7)
        written.append(contents(out))
    assert written[0] == written[1] == written[2]
    assert sorted(written[0]) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("method", TENSORWISE)
def test_output_bytes_are_independent_of_workers_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Contract: 1, 2 and 3 workers write the same bytes, and whole tensors the same as blocks."""
    base, models = folders(tmp_path)
    merge_folders(method, models, base, tmp_path / "whole", bound(method, 2), seed=7)
    monkeypatch.setattr(contract, "BLOCK", 5)
    for workers in (1, 2, 3):
        merge_folders(method, models, base, tmp_path / str(workers), bound(method, 2), seed=7, workers=workers)
        assert contents(tmp_path / str(workers)) == contents(tmp_path / "whole")


def test_random_methods_depend_on_the_seed(tmp_path: Path) -> None:
    """Contract: another seed gives another draw, the same seed the same."""
    base, models = folders(tmp_path)
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        merge_folders("dare", models, base, tmp_path / name, bound("dare", 2), seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != contents(tmp_path / "c")


@pytest.mark.parametrize("visit", [sorted, lambda names: sorted(names, reverse=True)])
def test_random_numbers_are_independent_of_tensor_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visit: Any) -> None:
    """Contract: a tensor's random numbers depend on its name, not on the order in which tensors are merged."""
    base, models = folders(tmp_path)
    merge_folders("dare_ties", models, base, tmp_path / "out", bound("dare_ties", 2), seed=0)
    inputs = streaming.Inputs.open(models, base)
    expected = load_file(tmp_path / "out" / "model.safetensors")
    for name in visit(inputs.names):
        assert torch.equal(
            next(streaming.merged_pieces("dare_ties", inputs, name, bound("dare_ties", 2), 0, None)), expected[name]
        )


def test_output_file_equals_that_of_safetensors_save_file(tmp_path: Path) -> None:
    """Contract: the streamed file is byte for byte what safetensors would save, with metadata {"format": "pt"} only."""
    tensors = random_tensors(0, SHAPES) | {"model.steps": torch.arange(3), "model.flag": torch.tensor([True])}
    model = write_folder(tmp_path / "m", tensors)
    merge_folders("linear", [model], None, tmp_path / "out", bound("linear", 1), seed=0)
    save_file(tensors, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


def test_sharded_output_has_a_valid_index(tmp_path: Path) -> None:
    """Contract: shard_bytes limits a file; the index names every tensor's file; the values equal those of an unsharded output."""
    base, models = folders(tmp_path)
    merge_folders("ram_plus", models, base, tmp_path / "one", bound("ram_plus", 2), seed=0)
    merge_folders("ram_plus", models, base, tmp_path / "many", bound("ram_plus", 2), seed=0, shard_bytes=150)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    assert index["metadata"]["total_size"] == 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    whole = load_file(tmp_path / "one" / "model.safetensors")
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "many" / file)[name], whole[name])


def test_global_ram_plus_sums_counts_over_all_tensors(tmp_path: Path) -> None:
    """Contract: ram.scope global takes two passes; the first sums integer counts over all tensors."""
    base = {"a": torch.zeros(2), "b": torch.zeros(2)}
    first = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([1.0, 0.0])}
    second = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([0.0, 0.0])}
    paths = [write_folder(tmp_path / name, tensors) for name, tensors in [("0", base), ("1", first), ("2", second)]]
    params = bound("ram_plus", 2, ram=Ram(r=0.1, alpha=5.0))
    result = merge_folders("ram_plus", paths[1:], paths[0], tmp_path / "out", params, seed=0)
    assert result.totals is not None
    assert (result.totals["shared"].tolist(), result.totals["unique"].tolist()) == ([2, 2], [1, 0])
    assert load_file(tmp_path / "out" / "model.safetensors")["b"].tolist() == pytest.approx([1.2, 0.0])


def test_bfloat16_models_are_merged_in_float32(tmp_path: Path) -> None:
    """Contract: deltas are float32 whatever the stored dtype; weights and config are written with out_dtype."""
    values = {"w": torch.tensor([1.0, 1.0 + 2.0**-7, 3.0]).bfloat16()}
    paths = [write_folder(tmp_path / name, values) for name in "ab"]
    for dtype, expected in [("float32", torch.float32), ("bfloat16", torch.bfloat16)]:
        merge_folders("linear", paths, None, tmp_path / dtype, bound("linear", 2), seed=0, out_dtype=dtype)
        got = load_file(tmp_path / dtype / "model.safetensors")["w"]
        assert got.dtype == expected
        assert torch.equal(got.float(), values["w"].float())
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype


class _Watcher(Merger):
    """Records the peak number of tensors, read or merged, that are alive at once."""

    needs_base = True
    Settings = Section
    weighted = True

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def watch(self, tensor: Tensor) -> Tensor:
        self.made.append(weakref.ref(tensor))
        self.peak = max(self.peak, sum(ref() is not None for ref in self.made))
        return tensor

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: Any) -> dict[str, int]:
        return {"seen": 1}

    def merge_tensor(
        self, name: str, base: Tensor | None, models: Sequence[Tensor], params: Any, rng: torch.Generator, totals: Any
    ) -> Tensor:
        return self.watch(models[0].float() + 1.0)


def test_memory_does_not_grow_with_the_number_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: only one tensor of the base and of each model is in memory at a time, in both passes and while writing."""
    peaks = []
    read = TensorFolder.tensor
    for count in (3, 60):
        tensors = random_tensors(0, {f"layers.{i}.w": (32, 16) for i in range(count)})
        paths = [write_folder(tmp_path / f"{count}-{name}", tensors, shards=2) for name in ("base", "a", "b")]
        watcher = _Watcher()
        monkeypatch.setitem(LOADED, "watcher", watcher)  # type: ignore[arg-type]
        monkeypatch.setattr(TensorFolder, "tensor", lambda self, name, watcher=watcher: watcher.watch(read(self, name)))
        merge_folders("watcher", paths[1:], paths[0], tmp_path / f"{count}-out", bound("watcher", 2), seed=0)
        assert len(watcher.made) == count * (3 + 3 + 1)
        peaks.append(watcher.peak)
    # One tensor of the base and of two models, the merged tensor, and at most one model's previous tensor.
    assert peaks[0] == peaks[1] <= 5


def test_missing_and_mismatched_tensors_are_rejected_by_name(tmp_path: Path) -> None:
    """Contract: if folders differ in tensor names or shapes, the error names tensor and folder, and nothing is written."""
    base, models = folders(tmp_path)
    tensors = load_file(models[1] / "model.safetensors")
    fewer = write_folder(tmp_path / "fewer", {name: tensor for name, tensor in tensors.items() if "norm" not in name})
    with pytest.raises(MergeError, match=r"fewer lacks model\.norm\.weight"):
        merge_folders("ram", [models[0], fewer], base, tmp_path / "out", bound("ram", 2), seed=0)
    wider = write_folder(tmp_path / "wider", tensors | {"model.norm.weight": torch.zeros(5)})
    with pytest.raises(MergeError, match=r"model\.norm\.weight is \[4\] in .*m0 and \[5\] in .*wider"):
        merge_folders("ram", [models[0], wider], base, tmp_path / "out", bound("ram", 2), seed=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shards", [1, 3])
def test_truncated_and_missing_files_are_rejected_by_name(tmp_path: Path, shards: int) -> None:
    """Contract: a truncated file, a missing file and a missing folder give errors that name them."""
    base, models = folders(tmp_path, shards=shards)
    victim = sorted(models[1].glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:-10])
    with pytest.raises(MergeError, match=re.escape(str(victim)) + ".*truncated"):
        merge_folders("ram", models, base, tmp_path / "out", bound("ram", 2), seed=0)
    victim.unlink()
    with pytest.raises(MergeError, match=re.escape(str(victim)) + ".*missing"):
        merge_folders("ram", models, base, tmp_path / "out", bound("ram", 2), seed=0)
    with pytest.raises(MergeError, match=r"nowhere does not exist"):
        merge_folders("ram", [models[0], tmp_path / "nowhere"], base, tmp_path / "out", bound("ram", 2), seed=0)


def test_index_that_does_not_match_its_shards_is_rejected(tmp_path: Path) -> None:
    """Contract: the error names a tensor that the index lists and the shard lacks."""
    _, models = folders(tmp_path, shards=2)
    path = models[0] / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(MergeError, match="ghost"):
        merge_folders("linear", [models[0]], None, tmp_path / "out", bound("linear", 1), seed=0)


def test_failed_merge_keeps_previous_output(tmp_path: Path) -> None:
    """Contract: the output folder is replaced only by a complete one."""
    base, models = folders(tmp_path)
    out = tmp_path / "out"
    merge_folders("linear", models, base, out, bound("linear", 2), seed=0)
    before = contents(out)
    broken = load_file(models[0] / "model.safetensors") | {"model.norm.weight": torch.full((4,), float("nan"))}
    bad = write_folder(tmp_path / "nan", broken)
    with pytest.raises(MergeError, match=r"model\.norm\.weight is not finite"):
        merge_folders("linear", [models[0], bad], base, out, bound("linear", 2), seed=0)
    assert contents(out) == before


def test_buffers_come_from_base_and_packed_weights_are_rejected(tmp_path: Path) -> None:
    """Contract: non-float buffers are copied from the base; integer weights that differ are not merged silently."""
    float_part = {"w": torch.ones(2, 2)}
    base = write_folder(tmp_path / "base", float_part | {"steps": torch.tensor(5)})
    model = write_folder(tmp_path / "model", float_part | {"steps": torch.tensor(9)})
    merge_folders("linear", [model], base, tmp_path / "out", bound("linear", 1), seed=0)
    assert int(load_file(tmp_path / "out" / "model.safetensors")["steps"]) == 5
    packed = [write_folder(tmp_path / f"q{i}", {"q": torch.full((2, 2), i, dtype=torch.int8)}) for i in range(2)]
    with pytest.raises(MergeError, match="quantised"):
        merge_folders("linear", packed, None, tmp_path / "out2", bound("linear", 2), seed=0)


def test_tied_output_embedding_is_omitted(tmp_path: Path) -> None:
    """Contract: with tied embeddings the output embedding is left out, whether or not a folder stores it."""
    config = {"tie_word_embeddings": True}
    tensors = random_tensors(0, SHAPES)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    twice = write_folder(tmp_path / "twice", tensors, config=config)
    once = write_folder(tmp_path / "once", {k: v for k, v in tensors.items() if k != "lm_head.weight"}, config=config)
    merge_folders("linear", [twice, once], once, tmp_path / "out", bound("linear", 2), seed=0)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_different_vocabularies_are_rejected(tmp_path: Path) -> None:
    """Contract: tokenizers with different token ids are rejected; different padding settings are accepted."""
    base, models = folders(tmp_path)
    vocab = {"a": 0, "b": 1}
    for path, tokenizer in [
        (models[0], {"model": {"vocab": vocab}, "padding": None}),
        (models[1], {"model": {"vocab": vocab}, "padding": {"direction": "Left"}}),
    ]:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    merge_folders("linear", models, base, tmp_path / "out", bound("linear", 2), seed=0)
    (models[1] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1, "b": 0}}}))
    with pytest.raises(MergeError, match="different token ids"):
        merge_folders("linear", models, base, tmp_path / "out", bound("linear", 2), seed=0)


def test_global_ties_sums_histograms_over_all_tensors(tmp_path: Path) -> None:
    """Contract: the global scope's first pass adds histograms over all tensors."""
    base, models = folders(tmp_path)
    result = merge_folders(
        "ties", models, base, tmp_path / "out", bound("ties", 2, ties=Ties(scope="global"), density=0.25), seed=0
    )
    assert result.totals is not None
    assert result.totals["magnitudes"].sum(dim=1).tolist() == [result.entries, result.entries]
