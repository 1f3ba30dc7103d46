"""Models as plain `save_pretrained` folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from stages.agent.policy import check_folder, load_policy, save_policy
from stages.engine.adapters import Adapter, is_adapter
from stages.runtime.files import atomic_folder


def write_model(folder: Path, target: Path) -> None:
    """Write the model in `folder` to `target`: its files as they are; of a LoRA adapter its base with the adapter folded in, in
    the base's precision.

    Raises FileExistsError rather than write over a folder, PolicyError for a model that is not whole.
    """
    if target.exists():
        raise FileExistsError(f"{target} is there already; name a folder that is not")
    check_folder(folder)
    if is_adapter(folder):
        config = json.loads((Adapter(folder).base / "config.json").read_text(encoding="utf-8"))
        policy = load_policy(folder, precision=config.get("dtype") or config.get("torch_dtype") or "float32")
        save_policy(policy.model, policy.tokenizer, target)
        return
    with atomic_folder(target) as partial:
        shutil.copytree(folder, partial, dirs_exist_ok=True)
