"""The torch engine on many architectures: log-probabilities equal the model's; unsupported models are rejected early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import LONG, MAKERS, SHAPE, WINDOW, make
from playing import play, random_tokens
from safetensors.torch import save_file
from tiny import make_tiny_tokenizer

from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy, save_policy
from stages.engine import self_check, torch_engine
from stages.engine.architectures import check_path, unserved, windows
from stages.engine.cache import SUM_BLOCK, SlotCache
from stages.engine.cuda_graphs import GraphedForward
from stages.engine.engine import Sampling
from stages.engine.passes import LENGTH_STEP
from stages.engine.torch_engine import TorchEngine

MAX_LENGTH = 200
WINDOWED = [name for name in MAKERS if name not in ("llama", "gpt2", "gpt_neox")]


RAGGED = {0: 3, 1: 170, 2: 60, 3: 100, 4: 1, 5: 140}


@pytest.mark.parametrize("name", MAKERS)
def test_sampled_logprobs_equal_the_models_for_every_architecture(name: str) -> None:
    """Contract: for any attention pattern, sampled log-probabilities equal those computed in training: with rows of unequal
    length, beyond every window, in forks of a shared prompt and after observations."""
    model = make(name)
    engine = TorchEngine(model, [], slots=8, max_length=MAX_LENGTH)
    for tokens, drawn, logprobs in play(engine, RAGGED, forked=150).values():
        mask = torch.tensor([drawn])
        with torch.no_grad():
            expected = token_logprobs(model, torch.tensor([tokens]), mask)[mask]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", WINDOWED)
def test_self_check_finds_missing_sliding_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: an architecture that would be computed wrongly is rejected; the message names it, the difference and the
    remedy."""
    model = make(name)
    monkeypatch.setattr(torch_engine, "windows", lambda config: [None] * config.num_hidden_layers)
    message = rf"{type(model).__name__} .* differ .* by [\d.]+ of their norm .* up to model.max_length 200 .*set model.path"
    with pytest.raises(ValueError, match=message):
        TorchEngine(model, [], slots=8, max_length=MAX_LENGTH)


@pytest.mark.parametrize("name", ["mistral", "mixtral", "gemma3", "gpt_oss"])
def test_self_check_tolerates_bfloat16_rounding(name: str) -> None:
    TorchEngine(make(name).bfloat16(), [], slots=8, max_length=MAX_LENGTH)


def test_self_check_has_no_side_effects() -> None:
    """Contract: it draws no random number and leaves the model, the cache and the counters unchanged."""
    model = make("mistral").train()
    before, attention = torch.random.get_rng_state(), model.config._attn_implementation
    engine = TorchEngine(model, [], slots=4, max_length=64)
    assert (torch.random.get_rng_state() == before).all()
    assert (model.training, model.config._attn_implementation) == (True, attention)
    assert set(engine.counters.values()) == {0}
    for left in (engine.cache.data, engine.table.active, engine.table.position, engine.table.last):
        assert not left.any()
    assert engine.table.vacant == 4


@pytest.mark.parametrize(
    ("function", "what"), [("_difference", "in the torch engine"), ("model_states", "by its own forward pass")]
)
def test_self_check_error_names_the_model_and_gives_the_reason(monkeypatch: pytest.MonkeyPatch, function: str, what: str) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(self_check, function, failing)
    with pytest.raises(ValueError, match=rf"LlamaForCausalLM .* does not run {what} \(shapes differ\)"):
        TorchEngine(make("llama"), [], slots=4, max_length=64)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "phi3", "gemma2", "gpt_neo"])
def test_sampling_with_windows_is_batch_invariant(name: str) -> None:
    """Contract: with sliding windows, too, a session samples the same bits whatever else is in the batch."""
    torch.set_num_threads(1)
    model = make(name)
    lengths = {name: 1 + 37 * name % 430 for name in range(16)}
    batched = play(TorchEngine(model, [], slots=16, max_length=480), lengths)
    for one in (2, 7, 11):
        assert play(TorchEngine(model, [], slots=4, max_length=480), {one: lengths[one]})[one] == batched[one]


def test_windowed_layer_reads_only_its_window_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a layer with a window reads at most the window and its rounding, however ragged the rows are."""
    engine = TorchEngine(make("gemma3"), [], slots=8, max_length=480)
    read: dict[int | None, list[int]] = {WINDOW: [], None: []}
    plain = SlotCache.read

    def recording(cache: SlotCache, rows: Any, view: Any, layer: int) -> Any:
        keys, values = plain(cache, rows, view, layer)
        read[cache.kinds[cache.kind_of[layer]]].append(keys.shape[2])
        return keys, values

    sessions = [engine.open(random_tokens(1, 400)), engine.open(random_tokens(2, 5))]
    for session in sessions:
        engine.request(session, session, Sampling(max_tokens=1))
    while engine.advance():
        pass
    monkeypatch.setattr(SlotCache, "read", recording)
    for session in sessions:
        engine.request(session, session, Sampling(max_tokens=9))
    while engine.advance():
        pass
    assert max(read[WINDOW]) <= WINDOW + SUM_BLOCK + LENGTH_STEP < 400 < min(read[None])


def test_windows_move_with_rows_in_recorded_passes() -> None:
    """Contract: windows stay correct on a GPU, where recorded passes are replayed as CUDA graphs."""
    model, recordings = make("mistral"), []

    def record(function: Any) -> Any:
        result = function().clone()
        recordings.append(result)
        return (lambda: result.copy_(function())), result

    plain = play(TorchEngine(model, [], slots=4, max_length=300), {0: 200, 1: 20, 2: 90})
    engine = TorchEngine(model, [], slots=4, max_length=300)
    engine._layers = GraphedForward(engine._layers, record)
    engine._passes._cpu, engine._passes._block = False, 1
    for (tokens, _, found), (expected, _, logprobs) in zip(
        play(engine, {0: 200, 1: 20, 2: 90}).values(), plain.values(), strict=True
    ):
        assert tokens == expected
        torch.testing.assert_close(torch.tensor(found), torch.tensor(logprobs), atol=1e-5, rtol=0)
    assert 0 < len(recordings) < 9


# ---- check of model.path ----------------------------------------------------------------------------------------------------

UNSUPPORTED = {
    "Gemma 3 with images": (hf.Gemma3Config(), "multimodal"),
    "T5": (hf.T5Config(), "encoder"),
    "longrope": (
        hf.Phi3Config(**SHAPE, original_max_position_embeddings=128, rope_parameters=LONG),
        "model.max_length is 200, .* at most 128",
    ),
    "too long": (hf.LlamaConfig(max_position_embeddings=128), "max_position_embeddings is 128"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_model_is_rejected_by_its_configuration(name: str, tmp_path: Path) -> None:
    """Contract: an unsupported architecture is rejected before any weights are read, in one line with reason and remedy."""
    config, reason = UNSUPPORTED[name]
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=f"(?s)model: .*{reason}") as found:
        check_path("model", tmp_path, MAX_LENGTH)
    assert "set model.path" in str(found.value).lower() or "lower model.max_length" in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", MAKERS)
def test_supported_model_passes_the_check(name: str, tmp_path: Path) -> None:
    config = make(name).config
    config.save_pretrained(tmp_path)
    check_path(".", tmp_path, MAX_LENGTH)
    assert (WINDOW in windows(config)) == (name in WINDOWED)


def test_hub_model_is_checked_if_its_configuration_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    check_path("hub:org/name", tmp_path, MAX_LENGTH)  # not cached: the stage that downloads it checks it
    store = tmp_path / "models--org--name"
    hf.T5Config().save_pretrained(store / "snapshots" / "abc")
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("abc")
    with pytest.raises(ValueError, match="model_type t5"):
        check_path("hub:org/name", tmp_path, MAX_LENGTH)
    with pytest.raises(ValueError, match="model_type t5"):
        check_path("hub:org/name@abc", tmp_path, MAX_LENGTH)


def test_check_of_an_adapter_reads_its_base(tmp_path: Path) -> None:
    hf.T5Config().save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "base"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    pair = {f"base_model.model.layer.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"}
    save_file(pair, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(ValueError, match="model_type t5"):
        check_path("adapter", tmp_path, MAX_LENGTH)


def test_fast_configuration_check_agrees_with_the_full_one(tmp_path: Path) -> None:
    """Contract: Llama's config.json is checked without importing transformers' configurations, with the same result."""
    for changes in ({}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, {"layer_types": None}):
        config = hf.LlamaConfig(**SHAPE, **changes)
        config.save_pretrained(tmp_path)
        for length in (200, 512, 513):
            expected = unserved(config, length)
            if expected is None:
                check_path(".", tmp_path, length)
            else:
                with pytest.raises(ValueError, match="max_position_embeddings is 512"):
                    check_path(".", tmp_path, length)


@pytest.mark.parametrize("name", ["gpt_neo", "gpt_oss"])
def test_model_without_sdpa_loads_with_eager_attention(name: str, tmp_path: Path) -> None:
    save_policy(make(name), make_tiny_tokenizer(), tmp_path / "model")
    assert load_policy(tmp_path / "model", attention="sdpa").model.config._attn_implementation == "eager"


def test_window_longer_than_sessions_changes_no_bit() -> None:
    """Contract: a window has no effect until a session is longer than it."""
    model = make("mistral")
    played = []
    for window in (None, 199, 4096):
        model.config.sliding_window = window
        played.append(play(TorchEngine(model, [], slots=4, max_length=MAX_LENGTH), {0: 3, 1: 170, 2: 60}))
    assert played[0] == played[1] == played[2]
