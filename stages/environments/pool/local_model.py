"""A member that is a model in a folder: greedy decoding by transformers, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.environments.pool.reply import NONE, Reply
from stages.environments.pool.settings import LocalModel


class LocalModelBackend:
    """Raises ValueError for a folder without a model."""

    def __init__(self, settings: LocalModel, max_tokens: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._settings, self._max_tokens = settings, max_tokens
        folder = Path(settings.folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is no model (it has no config.json); copy a save_pretrained folder there")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

    def ask(self, question: str) -> Reply:
        import torch

        message = {"role": "user", "content": self._settings.prompt.replace("{question}", question)}
        text = self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            made = self._model.generate(
                **{name: ids[name] for name in ("input_ids", "attention_mask")},
                max_new_tokens=self._max_tokens,
                do_sample=False,
                pad_token_id=self._tokenizer.eos_token_id,
            )
        new = made[0, ids["input_ids"].shape[1] :].tolist()
        if new and new[-1] == self._tokenizer.eos_token_id:
            new = new[:-1]
        return Reply(" ".join(self._tokenizer.decode(new, skip_special_tokens=True).split()) or NONE, len(new))
