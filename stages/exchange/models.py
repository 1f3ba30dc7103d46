"""Models as plain `save_pretrained` folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from stages.agent.policy import check_folder, load_policy, save_policy
from stages.engine.adapters import Adapter, is_adapter
from stages.exchange.sentencepiece import add_sentencepiece
from stages.runtime.files import atomic_folder


def write_model(folder: Path, target: Path) -> None:
    """Copy the model in `folder` to `target`; a LoRA adapter is merged into its base, in the base's precision. A tokenizer of
    SentencePiece's kind gets a `tokenizer.model`, if it has none.

    Raises FileExistsError if `target` exists, PolicyError for an incomplete model.
    """
    if target.exists():
        raise FileExistsError(f"{target} already exists; choose another folder")
    check_folder(folder)
    with atomic_folder(target) as partial:
        if is_adapter(folder):
            config = json.loads((Adapter(folder).base / "config.json").read_text(encoding="utf-8"))
            policy = load_policy(folder, precision=config.get("dtype") or config.get("torch_dtype") or "float32")
            save_policy(policy.model, policy.tokenizer, partial)
        else:
            shutil.copytree(folder, partial, dirs_exist_ok=True)
        add_sentencepiece(partial)
