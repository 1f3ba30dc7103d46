"""merge_ram, merge_ties: merging three float32 specialists of about 1 GB each, against mergekit.

Each run is its own process, to measure its peak memory; only the merge is timed, not imports. Both sides use the same settings:
RAM with the same epsilon, TIES per tensor (the only kind in mergekit) with the same density. The scenario fails if the merged
models differ. The first runs start with a cold page cache and give the bytes read and written; the repeats run with a warm one.
Beside each repeat, one thread reads all inputs and writes as much as the merged model (`limit_s`), which every merge must do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Options, Result, Sample, rounded, turns
from benchmarks.models import Shape

SPECIALISTS = 3
METHODS = ("ram", "ties")
SIDES = ("ours", "theirs")
TOLERANCE = 1e-5
"""Largest difference of the merged models, relative to the merged change."""
EPSILON, DENSITY = 1e-5, 0.5
CHANGED = 0.3
"""Share of the weights that a specialist changes."""
ABOUT_1_GB = Shape(layers=16, hidden=1024, intermediate=4096, heads=16)
SMALL = Shape(layers=2, hidden=64, intermediate=128, heads=2)
AGAINST = "mergekit"


class DisagreementError(RuntimeError):
    """The two sides do not compute the same merge."""


def make_models(options: Options, shape: Shape, folder: Path) -> list[Path]:
    """Base and specialists as `save_pretrained` folders: random weights, and random changes to a share of them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stages.agent.policy import load_tokenizer, save_policy

    tokenizer = load_tokenizer(options.root / "data" / "base")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=shape.positions,
            tie_word_embeddings=True,
        )
    )
    save_policy(model, tokenizer, folder / "base")
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    folders = [folder / "base"]
    for number in range(SPECIALISTS):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                changes = torch.rand_like(parameter).lt_(CHANGED).mul_(torch.randn_like(parameter)).mul_(1e-3)
                parameter.copy_(start[name] + changes)
        folders.append(folder / f"specialist-{number}")
        save_policy(model, tokenizer, folders[-1])
    return folders


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def drop_page_cache(folders: list[Path]) -> None:
    """Ask the kernel to drop the files' pages, so that the next run reads from disk."""
    os.sync()
    for path in (path for folder in folders for path in folder.glob("*.safetensors")):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def merged_folder(folders: list[Path], who: str) -> Path:
    return folders[0].parent / f"merged-{who}"


def difference(method: str, folders: list[Path]) -> float:
    """Distance of the two merged models relative to the distance of ours from the base (L2 norm over all weights).

    Raises DisagreementError if it exceeds TOLERANCE or if the tensor names differ.
    """
    from stages.merging.folders import TensorFolder

    mine, other, base = (TensorFolder(path) for path in (*(merged_folder(folders, who) for who in SIDES), folders[0]))
    if set(mine.infos) != set(other.infos):
        raise DisagreementError(f"{method}: only one side has {sorted(set(mine.infos) ^ set(other.infos))[:4]}")
    apart = moved = 0.0
    for name in sorted(mine.infos):
        tensor = mine.tensor(name)
        apart += float((tensor - other.tensor(name)).double().square().sum())
        moved += float((tensor - base.tensor(name)).double().square().sum())
    for folder in (mine, other, base):
        folder.close()
    relative = (apart / moved) ** 0.5
    if not relative <= TOLERANCE:
        raise DisagreementError(
            f"{method}: the merged models differ by {relative:.2g} relative to the change (at most {TOLERANCE:g}), so their "
            f"times cannot be compared"
        )
    return relative


def run_once(options: Options, who: str, method: str, folders: list[Path], keep: bool = False) -> dict[str, Any]:
    """One merge in its own process; its measurements (see `merge_process`). With `keep` the merged model stays."""
    out = merged_folder(folders, who)
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.merge_process", who, method, str(out), *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": str(options.root)}
    done = subprocess.run(command, cwd=options.root, capture_output=True, text=True, env=environment, check=False)
    if not keep:
        shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        raise RuntimeError(f"{who}: merging with {method} failed: {done.stderr.strip()[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def measure_method(options: Options, method: str, folders: list[Path]) -> Result:
    cold = {}
    for who in SIDES:
        drop_page_cache(folders)
        cold[who] = run_once(options, who, method, folders, keep=True)
    apart = difference(method, folders)
    samples: dict[str, list[Sample]] = {who: [] for who in SIDES}
    limits: list[float] = []
    runs: dict[str, list[dict[str, Any]]] = {who: [] for who in SIDES}
    for order in turns(options.times):
        for who in (SIDES[place] for place in order):
            measured = run_once(options, who, method, folders)
            samples[who].append(Sample(1.0, measured["wall_s"], measured["cpu_s"]))
            runs[who].append(measured)
        limits.append(run_once(options, "limit", method, folders)["wall_s"])
    notes = {
        "bytes_per_model": weight_bytes(folders[0]),
        "specialists": SPECIALISTS,
        "difference": rounded(apart),
        "limit_s": rounded(median(limits)),
        "times_limit": rounded(median(run["wall_s"] for run in runs["ours"]) / median(limits)),
        "peak_memory_bytes": {name: max(run["peak_rss_bytes"] for run in runs[name]) for name in SIDES},
        "peak_anonymous_bytes": {name: max(run["peak_anonymous_bytes"] for run in runs[name]) for name in SIDES},
        "cold": {who: {key: rounded(value, 6) for key, value in measured.items()} for who, measured in cold.items()},
    }
    return Result("s", f"{AGAINST} {method}", "seconds", samples["ours"], samples["theirs"], notes=notes)


def measure(options: Options) -> dict[str, Result]:
    folder = options.scratch / "merge"
    try:
        folders = make_models(options, SMALL if options.quick else ABOUT_1_GB, folder)
        return {f"merge_{method}": measure_method(options, method, folders) for method in METHODS}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
