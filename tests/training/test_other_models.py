"""rl with a model that only its own forward pass runs: a recurrent one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_tokenizer

from stages import rl
from stages.agent.policy import save_policy
from training.toys import KilledError, kill_at_step, outputs, run

SECTION: dict[str, Any] = {
    "algorithm": "grpo",
    "steps": 6,
    "tasks_per_step": 3,
    "group_size": 4,
    "learning_rate": 0.02,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 2},
}


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    tokenizer, folder = make_tiny_tokenizer(), tmp_path_factory.mktemp("mamba") / "policy"
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    config = MambaConfig(**sizes, initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=3)
    save_policy(MambaForCausalLM(config).eval(), tokenizer, folder)
    return folder


@pytest.mark.slow
def test_recurrent_policy_learns_and_resumes_to_the_same_bytes(make_context, mamba: Path) -> None:
    """Contract: sampled log-probabilities are training's, the policy learns, and a killed run ends in the same bytes."""

    def context(name: str) -> Any:
        made = make_context("rl", name, rl=SECTION, model={"path": str(mamba), "max_length": 128})
        sft = made.root / "data/models/sft"
        sft.unlink()
        sft.symlink_to(mamba)
        return made

    plain = context("plain")
    history = run(plain)
    report = json.loads((plain.root / "reports/rl/toy.json").read_text())
    assert report["max_logprob_difference"] < 1e-4
    assert history[-1]["reward_mean"] > history[0]["reward_mean"]
    killed = context("killed")
    kill_at_step(killed, 3)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(context("killed"))
    assert outputs(killed.root) == outputs(plain.root)
