"""Models for benchmarks: random weights, the shipped tokenizer. Both sides load the same files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Options, Side, rounded
from stages.runtime.files import locked


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    positions: int = 2048
    kv_heads: int = 0
    """0: as many as heads."""
    vocabulary: int = 0
    """Padded to this size if larger than the tokenizer's."""
    dtype: str = "float32"
    """Precision of the stored weights."""
    family: str = "llama"
    """llama, or gemma3: a window of 512 tokens in five layers of six, heads of 256."""


SHAPES = {
    "tiny": Shape(layers=2, hidden=32, intermediate=64, heads=2),
    "1m": Shape(layers=4, hidden=128, intermediate=512, heads=4),
    "9m": Shape(layers=8, hidden=256, intermediate=1024, heads=8),
    "large": Shape(24, 896, 4864, 14, kv_heads=2, vocabulary=32768, dtype="bfloat16"),
    "large-tiny": Shape(2, 32, 64, 4, kv_heads=2, vocabulary=4096, dtype="bfloat16"),
    "270m": Shape(18, 640, 2048, 4, kv_heads=1, vocabulary=262144, dtype="bfloat16", family="gemma3"),
    "270m-tiny": Shape(2, 32, 64, 4, kv_heads=1, vocabulary=4096, dtype="bfloat16", family="gemma3"),
}
"""Sizes by name: 1m and 9m have 1.2 and 8.6 million parameters, embedding included; large has the layers of Qwen2.5-0.5B and
387 million, 270m those of Gemma 3 270M, with its vocabulary; large-tiny and 270m-tiny replace them in quick mode."""


def sizes(options: Options) -> list[str]:
    """The sizes that a scenario measures."""
    return ["tiny"] if options.quick else ["1m", "9m"]


def named(scenario: str, size: str) -> str:
    return f"{scenario}@{size}"


def make_model(options: Options, size: str) -> Path:
    """The `save_pretrained` folder of a random model, made once per scratch folder."""
    folder = options.scratch / f"model-{size}"
    with locked(folder.with_suffix(".lock"), wait=True):  # the processes of a side all need it
        if not folder.exists():
            _make(options.root, folder, SHAPES[size])
    return folder


def _make(root: Path, folder: Path, shape: Shape) -> None:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    from stages.agent.policy import load_tokenizer, save_policy

    tokenizer = load_tokenizer(root / "data" / "base")
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": max(len(tokenizer), shape.vocabulary),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model: Any = (
        Gemma3ForCausalLM(Gemma3TextConfig(**settings, head_dim=256, sliding_window=512))
        if shape.family == "gemma3"
        else LlamaForCausalLM(LlamaConfig(**settings))
    )
    save_policy(model.to(getattr(torch, shape.dtype)), tokenizer, folder)


def load(folder: Path, attention: str, device: str = "cpu", precision: str = "float32") -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer); a new copy each time."""
    from stages.agent.policy import load_policy

    policy = load_policy(folder, device=device, precision=precision, attention=attention)
    return policy.model, policy.tokenizer


class ForwardCounter:
    """Context manager that counts the tokens through a model's input embedding, padding included."""

    def __init__(self, model: Any) -> None:
        self._module = model.get_input_embeddings()
        self.tokens = 0

    def _count(self, module: Any, arguments: Any) -> None:
        self.tokens += arguments[0].numel()

    def __enter__(self) -> ForwardCounter:
        self._hook = self._module.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def counting(side: Side, model: Any) -> Side:
    """The side with `facts`: (tokens that went through the model, padding included; amount of work) of a run."""

    def facts() -> tuple[int, float]:
        with ForwardCounter(model) as counter:
            amount = side.run()
        return counter.tokens, amount

    return replace(side, facts=facts)


def forwarded_per_unit(side: Side) -> float:
    """Tokens through the model for each unit of work; `side` is in processes of its own and counts."""
    tokens, amounts = zip(*side.facts(), strict=True)
    return rounded(sum(tokens) / sum(amounts))
