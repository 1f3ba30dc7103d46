"""LoRA adapter folders: loading, hashing and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapters import adapted_policy, make_adapter
from safetensors.torch import load_file, save_file
from tiny import make_tiny_policy

from stages.agent.policy import PolicyError, check_folder, load_policy, policy_hash
from stages.engine.adapters import Adapter, AdapterError, fold, is_adapter
from stages.engine.low_rank import base, is_plain

IDS = torch.arange(5, 25)[None]


@pytest.fixture
def folder(tiny_policy: Path, tmp_path: Path) -> Path:
    """data/models/rl/toy and its base data/models/sft, as in a finished run."""
    shutil.copytree(tiny_policy, tmp_path / "data/models/sft")
    return make_adapter(tmp_path / "data/models/rl/toy", tmp_path / "data/models/sft", "data/models/sft")


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def test_loaded_adapter_folder_equals_trained_model(folder: Path, tiny_policy: Path) -> None:
    """Contract: `load_policy` folds the adapter into the weights; logits equal those of the model with separate LoRA layers."""
    policy = load_policy(folder)
    check_folder(folder)
    trained = adapted_policy(tiny_policy).model
    torch.testing.assert_close(logits(policy.model), logits(trained), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(policy.model), logits(load_policy(tiny_policy).model), atol=1e-2)
    assert is_plain(layer := policy.model.model.layers[0].mlp.up_proj)
    assert base(layer) is layer
    assert policy.tokenizer.chat_template == load_policy(tiny_policy).tokenizer.chat_template


def test_peft_loads_folder_with_same_logits(folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(Adapter(folder).base, attn_implementation="eager")
    opened = PeftModel.from_pretrained(base, folder)
    torch.testing.assert_close(logits(opened), logits(load_policy(folder).model), atol=1e-5, rtol=1e-5)


def test_peft_finds_base_from_repository_root(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(tmp_path)
    opened = AutoPeftModelForCausalLM.from_pretrained("data/models/rl/toy", attn_implementation="eager")
    torch.testing.assert_close(logits(opened), logits(load_policy(folder).model), atol=1e-5, rtol=1e-5)


def test_adapter_folder_bytes_do_not_depend_on_location(folder: Path, tiny_policy: Path, tmp_path: Path) -> None:
    """Contract: the bytes depend only on the factors, the tokenizer and the base's name."""
    again = make_adapter(tmp_path / "elsewhere/deeper", tiny_policy, "data/models/sft")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        content = (folder / name).read_bytes()
        assert content == (again / name).read_bytes(), name
        assert str(tmp_path).encode() not in content
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "data/models/sft"
    assert config["target_modules"] == sorted(config["target_modules"])


def test_policy_hash_covers_adapter_and_base(folder: Path, tmp_path: Path) -> None:
    before = policy_hash(folder)
    assert before not in (policy_hash(tmp_path / "data/models/sft"), policy_hash(make_adapter_twin(folder, 1)))
    assert before == policy_hash(make_adapter_twin(folder, 0))
    shutil.rmtree(tmp_path / "data/models/sft")
    make_tiny_policy(tmp_path / "data/models/sft", seed=1)
    assert policy_hash(folder) != before


def make_adapter_twin(folder: Path, seed: int) -> Path:
    return make_adapter(folder.with_name(f"twin{seed}"), Adapter(folder).base, "data/models/sft", seed)


def test_nearest_base_above_the_folder_is_used(folder: Path, tiny_policy: Path, tmp_path: Path) -> None:
    """Contract: the base is searched from the adapter's folder upwards, independent of the working directory."""
    assert Adapter(folder).base == tmp_path / "data/models/sft"
    shutil.copytree(tiny_policy, tmp_path / "data/models/data/models/sft")
    assert Adapter(folder).base == tmp_path / "data/models/data/models/sft"
    assert is_adapter(folder)
    assert not is_adapter(tiny_policy)


def edit(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, r"use_dora.*merge_and_unload"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"bias": "all"}, "bias all"),
        ({"base_model_name_or_path": "org/name"}, "'org/name'.*restore the base"),
        ({"base_model_name_or_path": "data/models/rl/toy"}, "itself an adapter"),
    ],
)
def test_unsupported_adapter_is_rejected(folder: Path, changes: dict, message: str) -> None:
    edit(folder, **changes)
    with pytest.raises(AdapterError, match=message):
        load_policy(folder)


def test_scale_is_alpha_over_rank_or_sqrt_rank(folder: Path) -> None:
    assert Adapter(folder).scale == 2.0
    edit(folder, use_rslora=True)
    assert Adapter(folder).scale == 4.0


def test_damaged_folder_error_names_file_and_tensor(folder: Path, tmp_path: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(2)}, weights)
    with pytest.raises(AdapterError, match=r"base_model\.model\.lm_head\.weight"):
        load_policy(folder)
    save_file({name: tensor.repeat(2, 1) if "lora_B" in name else tensor for name, tensor in tensors.items()}, weights)
    with pytest.raises(AdapterError, match=r"has it as"):
        load_policy(folder)
    weights.write_bytes(weights.read_bytes()[:300])
    with pytest.raises(PolicyError, match=r"adapter_model\.safetensors is truncated"):
        load_policy(folder)
    weights.unlink()
    with pytest.raises(PolicyError, match=r"adapter_model\.safetensors is missing"):
        check_folder(folder)
    (tmp_path / "data/models/sft/model.safetensors").unlink()
    save_file(tensors, weights)
    with pytest.raises(PolicyError, match=r"sft/model\.safetensors is missing"):
        load_policy(folder)


def test_fold_adds_in_float32_and_rejects_unknown_names(tiny_policy: Path) -> None:
    model = load_policy(tiny_policy, precision="bfloat16").model
    name = "model.layers.0.mlp.up_proj.weight"
    before = model.get_parameter(name).clone()
    delta = torch.full(before.shape, 2.0**-10)
    fold(model, [(name, delta)])
    assert torch.equal(model.get_parameter(name), (before.float() + delta).bfloat16())
    with pytest.raises(AdapterError, match="nowhere"):
        fold(model, [("nowhere.weight", delta)])
