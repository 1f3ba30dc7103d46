"""Builders of tiny random policies for tests; the session-wide one is the fixture `tiny_policy`."""

from __future__ import annotations

from pathlib import Path

TINY_TEXT = (
    "look go north south east west open take put drop insert close the a key door box lamp room kitchen barn "
    "you are in see there is nothing here search answer question who what where of and inventory with"
)
TINY_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tiny_tokenizer(template: str = TINY_TEMPLATE):
    """A byte-level BPE tokenizer (any text can be encoded) with the special tokens and the chat template of the base model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([TINY_TEXT] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def make_tiny_model(vocab_size: int, kv_heads: int = 2, seed: int = 0, **changes):
    """A random Llama of about 50 thousand parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def make_tiny_gemma(vocab_size: int, seed: int = 0, **changes):
    """A random Gemma 3 of six layers, the last with full attention, as Gemma's."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(seed)
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**settings, **changes})).eval()


def make_tiny_policy(folder: Path, seed: int = 0, **changes) -> Path:
    """A tiny random policy in a `save_pretrained` folder."""
    from stages.agent.policy import save_policy

    tokenizer = make_tiny_tokenizer()
    save_policy(make_tiny_model(len(tokenizer), seed=seed, **changes), tokenizer, folder)
    return folder
