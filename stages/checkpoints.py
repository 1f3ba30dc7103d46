"""Atomic checkpoints and exact resume.

Checkpoints live outside DVC's outputs (DVC deletes those before a stage runs), in a folder named by the hash of the stage's
inputs: changed inputs never resume from old state. They are removed when the stage succeeds.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.files import atomic_file
from stages.lineage import input_hashes
from stages.runtime import StageContext


class Checkpoints:
    """Named checkpoints of one stage with its present inputs; `more` names inputs that dvc.yaml's entry of the stage does not."""

    def __init__(self, context: StageContext, more: Mapping[str, str] | None = None) -> None:
        key = json.dumps({**input_hashes(context.root, context.name, context.domain), **(more or {})}, sort_keys=True)
        self.parent = context.root / ".bellwether" / "checkpoints" / context.title
        self.folder = self.parent / hashlib.sha256(key.encode()).hexdigest()[:16]

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    def save(self, name: str, value: Any) -> None:
        """Write `value` (tensors, numbers, lists, dicts, dataclasses) so that a reader sees the old or the new, never a part.

        Raises OSError naming the file, the space it needs and what to do; an earlier checkpoint is left as it was.
        """
        import torch

        path = self.path(name)
        try:
            with atomic_file(path) as partial, partial.open("wb") as handle:
                torch.save(value, handle)
        except (OSError, RuntimeError) as error:
            free = shutil.disk_usage(self.parent if self.parent.exists() else Path.cwd()).free
            raise OSError(
                f"cannot write checkpoint {path}: {error} ({free / 1e6:.0f} MB free). Make room and run the stage again: "
                f"it goes on from its last good checkpoint"
            ) from error

    def load(self, name: str) -> Any | None:
        """What was saved under `name` with the same inputs, or None. A damaged file is reported and counts as absent."""
        import torch

        path = self.path(name)
        if not path.exists():
            return None
        try:
            return torch.load(path, map_location="cpu", weights_only=False)
        except (RuntimeError, EOFError, ValueError, KeyError, OSError, pickle.UnpicklingError) as error:
            print(f"checkpoint {path} cannot be read ({error}); starting this part again", flush=True)
            return None

    def clear(self) -> None:
        """The stage is done: remove its checkpoints, those of earlier inputs too."""
        shutil.rmtree(self.parent, ignore_errors=True)
