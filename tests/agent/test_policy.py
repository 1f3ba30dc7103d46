"""Policies: loading, errors, hashing, saving, training log-probabilities."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tiny import make_tiny_policy

from stages.agent import logprobs as logprobs_module
from stages.agent.logprobs import hidden_states, score_tokens, token_logprobs
from stages.agent.policy import PolicyError, load_policy, policy_hash, save_policy, usable_device


@pytest.fixture
def copied(tiny_policy, tmp_path):
    return shutil.copytree(tiny_policy, tmp_path / "policy")


def test_saved_policy_is_byte_identical_and_loads_in_transformers(tiny_policy, tmp_path):
    """Contract: a model folder's bytes depend only on weights, configuration and tokenizer."""
    policy = load_policy(tiny_policy)
    policy.tokenizer("a", padding=True)
    save_policy(policy.model, policy.tokenizer, tmp_path / "one")
    again = load_policy(tmp_path / "one", attention="sdpa")
    save_policy(again.model, again.tokenizer, tmp_path / "deeper" / "two")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "deeper" / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "deeper" / "two" / name).read_bytes(), name
    assert policy.hash == again.hash == policy_hash(tmp_path / "deeper" / "two")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert torch.equal(plain.lm_head.weight, policy.model.lm_head.weight)
    text = AutoTokenizer.from_pretrained(tmp_path / "one").apply_chat_template(
        [{"role": "user", "content": "look"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|user|>look<|end|><|assistant|>"


def test_policy_hash_covers_only_weights_config_and_tokenizer(copied, tmp_path):
    before = policy_hash(copied)
    (copied / "README.md").write_text("notes")
    assert policy_hash(copied) == before
    other = make_tiny_policy(tmp_path / "other", seed=1)
    assert policy_hash(other) != before
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert policy_hash(copied) != before


def test_missing_folder_or_file_error_names_it(copied, tmp_path):
    with pytest.raises(PolicyError, match=r"nowhere does not exist.*model\.path"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(PolicyError, match="hub:org/name"):
        load_policy("org/name", root=tmp_path)
    (copied / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"model\.safetensors is missing"):
        load_policy(copied)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_weights_error_names_file_and_remedy(copied, keep):
    weights = copied / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:keep])
    with pytest.raises(PolicyError, match=r"model\.safetensors is truncated.*restore it"):
        load_policy(copied)


def test_weights_with_missing_tensors_are_rejected(copied):
    """Contract: a folder that mixes two models is an error, not a model with random layers."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(PolicyError, match="lack 9 tensors"):
        load_policy(copied)


def test_hub_model_without_network_error_says_how_to_download(monkeypatch, tmp_path):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PolicyError, match=r"HF_HUB_OFFLINE is set.*hf download org/some-model"):
        load_policy("hub:org/some-model")


def test_invalid_hub_name_is_rejected():
    with pytest.raises(PolicyError, match="names no model"):
        load_policy("hub:not a name")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_and_gradients_equal_full_softmax(tiny_policy, temperature):
    """Contract: log-probabilities and entropies at masked positions, and their gradients, equal those of log softmax(logits /
    temperature) for any chunk size."""
    model = load_policy(tiny_policy).model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (3, 12), generator=generator)
    mask = torch.rand(3, 12, generator=generator) < 0.4
    mask[:, 0] = False
    logs = (model(ids).logits[:, :-1].float() / temperature).log_softmax(-1)
    expected = torch.zeros(3, 12)
    expected[:, 1:] = logs.gather(-1, ids[:, 1:, None])[..., 0]
    expected_entropy = torch.zeros(3, 12)
    expected_entropy[:, 1:] = -(logs.exp() * logs).sum(-1)
    (expected * mask + expected_entropy * mask).sum().backward()
    gradient = model.model.layers[0].mlp.up_proj.weight.grad.clone()
    for chunk in (3, 8192):
        model.zero_grad()
        scores = score_tokens(model, ids, mask, temperature, chunk=chunk, entropy=True)
        logprobs, entropy = scores.logprobs, scores.entropy
        torch.testing.assert_close(logprobs, (expected * mask).detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, (expected_entropy * mask).detach(), atol=1e-5, rtol=0)
        (logprobs + entropy).sum().backward()
        torch.testing.assert_close(model.model.layers[0].mlp.up_proj.weight.grad, gradient, atol=1e-4, rtol=1e-4)
    assert score_tokens(model, ids, mask).entropy is None
    scores = score_tokens(model, ids, mask, temperature, entropy=True, entropy_gradient=False)
    logprobs, numbers = scores.logprobs, scores.entropy
    torch.testing.assert_close(numbers, (expected_entropy * mask).detach(), atol=1e-5, rtol=0)
    assert logprobs.requires_grad
    assert not numbers.requires_grad
    with pytest.raises(ValueError, match="first token"):
        token_logprobs(model, ids, torch.ones_like(mask))


def test_right_padding_does_not_change_hidden_states(tiny_policy):
    model = load_policy(tiny_policy).model
    ids = torch.arange(5, 15)[None]
    padded = torch.cat([ids, torch.zeros(1, 6, dtype=torch.long)], 1)
    with torch.no_grad():
        torch.testing.assert_close(hidden_states(model, padded)[:, :10], hidden_states(model, ids), atol=1e-5, rtol=1e-5)


def test_unavailable_device_error_names_key_and_device_count(monkeypatch, tiny_policy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PolicyError, match=r"resources\.device is cuda:1, and torch .* sees 0 CUDA devices"):
        load_policy(tiny_policy, device="cuda:1")
    assert usable_device("cpu") == torch.device("cpu")


def test_logits_of_a_large_vocabulary_are_computed_in_parts(tiny_policy, monkeypatch):
    """Contract: no more than CHUNK_LOGITS logits exist at once, and scores and gradients do not change."""
    model = load_policy(tiny_policy).model
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[:, 0] = False
    found, seen = [], []
    model.get_output_embeddings().register_forward_hook(lambda layer, inputs, output: seen.append(output.numel()))
    for most in (1 << 26, 5 * vocabulary):
        monkeypatch.setattr(logprobs_module, "CHUNK_LOGITS", most)
        model.zero_grad()
        seen.clear()
        scores = token_logprobs(model, ids, mask)
        scores.sum().backward()
        found.append((scores.detach(), model.model.layers[0].mlp.up_proj.weight.grad.clone()))
        assert max(seen) <= most
    assert max(seen) == 5 * vocabulary
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)
