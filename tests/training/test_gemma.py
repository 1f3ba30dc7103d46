"""The lifecycle's training stages with a tiny random Gemma 3, as profiles/gemma-270m.yaml runs them: LoRA in bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_tiny_gemma, make_tiny_tokenizer
from transformers import Gemma3ForCausalLM

from stages import rl, sft
from stages.agent.policy import load_policy, save_policy
from training.toys import KilledError, kill_at_step, outputs

pytest.importorskip("peft", reason="needs the extra `lora`: pip install 'bellwether[lora]'")
pytestmark = pytest.mark.usefixtures("other_precision")
WINDOW = 16
"""Shorter than a prompt."""
SECTIONS: dict[str, Any] = {
    "resources": {"slots": 16, "threads": 1, "tokens_per_batch": 256, "precision": "bfloat16"},
    "sft": {"epochs": 2.0, "batch_tokens": 256, "learning_rate": 3e-3, "eval_every": 2, "checkpoint_every": 1},
    "rl": {
        "algorithm": "lite_ppo",
        "steps": 4,
        "tasks_per_step": 3,
        "group_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
        "checkpoint_every": 1,
        "imitation": {"ratio": 0.5},
        "sampling": {"max_tokens": 4},
    },
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with windows shorter than prompts."""
    tokenizer, folder = make_tiny_tokenizer(), tmp_path_factory.mktemp("gemma") / "policy"
    changes = {
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 3,
    }
    save_policy(make_tiny_gemma(len(tokenizer), **changes), tokenizer, folder)
    return folder


def context(make_context: Any, stage: str, name: str, gemma: Path, start: Path | None = None) -> Any:
    made = make_context(stage, name, **SECTIONS, model={"path": str(gemma), "max_length": 128, "lora": {"rank": 4, "alpha": 8}})
    if start is not None:
        folder = made.root / "data/models/sft"
        if folder.is_symlink():
            folder.unlink()
            shutil.copytree(start, folder)
    return made


def same_when_killed(make_context: Any, stage: Any, name: str, gemma: Path, moments: tuple[int, ...], start: Path | None) -> Any:
    """The context of an undisturbed run of a stage, whose outputs are those of one that was killed at these steps in turn."""
    plain = context(make_context, name, "plain", gemma, start)
    stage.run(plain)
    for moment in moments:
        killed = context(make_context, name, "killed", gemma, start)
        kill_at_step(killed, moment)
        with pytest.raises(KilledError):
            stage.run(killed)
    killed = context(make_context, name, "killed", gemma, start)
    stage.run(killed)
    assert outputs(killed.root) == outputs(plain.root)
    return plain


def test_warm_up_and_learning_end_in_the_same_bytes_after_three_kills(make_context: Any, gemma: Path, tmp_path: Path) -> None:
    """Contract: sft and rl, each killed at three moments, end in the bytes of undisturbed runs; embeddings stay as they are;
    sampling's log-probabilities are training's; the merged adapters open in transformers as Gemma 3."""
    learnt = same_when_killed(make_context, sft, "sft", gemma, (1, 2, 3), None)
    start = tmp_path / "start"
    shutil.copytree(learnt.root / "data/models/sft", start)
    before, after = (load_file(folder / "model.safetensors") for folder in (gemma, start))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    assert isinstance(load_policy(start).model, Gemma3ForCausalLM)
    shutil.rmtree(tmp_path / "plain")
    shutil.rmtree(tmp_path / "killed")
    played = same_when_killed(make_context, rl, "rl", gemma, (1, 2, 3), start)
    report = json.loads((played.root / "reports/rl/toy.json").read_text())
    assert report["mean_logprob_difference"] < 0.1
    adapter = load_file(played.root / "data/models/rl/toy/adapter_model.safetensors")
    assert adapter
    assert all(".lora_" in name for name in adapter)
