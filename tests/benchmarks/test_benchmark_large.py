"""The GPU comparison on tiny sizes on a CPU: bfloat16, LoRA and activation checkpointing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import large, train_step
from benchmarks.measure import Options


@pytest.fixture
def _other_precision() -> Iterator[None]:
    """Accelerate keeps one precision per process until its state is reset."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_with_trl", "_other_precision")
def test_both_sides_agree_in_bfloat16(options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Contract: loss and gradients agree with shared prompts and with checkpointing; results of other scenarios are kept."""
    pytest.importorskip("peft")
    monkeypatch.setattr(large, "METHODS", {"full": train_step.Method(), "lora": train_step.Method(4, checkpointing=True)})
    out, bf16 = tmp_path / "large.json", replace(options, precision="bfloat16")
    large.measure(bf16, [large.ROLLOUTS], out)
    large.measure(bf16, ["train_step"], out)
    scenarios = json.loads(out.read_text())["scenarios"]
    assert {name: outcome.get("failed") for name, outcome in scenarios.items()} == dict.fromkeys(
        [large.ROLLOUTS, "train_step_p24_full", "train_step_p24_lora"]
    )
    for name in ("full", "lora"):
        work = scenarios[f"train_step_p24_{name}"]["work"]
        assert work["prefixes_shared"]
        assert work["gradient_repeats"] == {"ours": True, "theirs": True}
    assert scenarios[large.ROLLOUTS]["peak_bytes"] == {"ours": None, "theirs": None}


def test_gradients_repeat_only_if_all_their_bits_do() -> None:
    first = 0.5, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    assert large.same(first, (0.5, {name: value.clone() for name, value in first[1].items()}))
    assert not large.same(first, (0.5, {**first[1], "b": torch.nextafter(first[1]["b"], torch.tensor([4.0]))}))
    assert not large.same(first, (0.25, first[1]))


@pytest.mark.slow
def test_without_a_gpu_nothing_is_written(options: Options, tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.large", "--out", str(tmp_path / "large.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=options.root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no CUDA device" in done.stdout
    assert not list(tmp_path.iterdir())
