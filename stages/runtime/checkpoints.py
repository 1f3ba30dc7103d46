"""Atomic checkpoints and exact resume.

Checkpoints live outside DVC's outputs (DVC deletes those before a stage runs), in a folder named by the hash of the stage's
inputs: changed inputs never resume from old state. They are removed when the stage succeeds.

Loading one executes no code: files contain only tensors, plain containers and the dataclasses that the reader allows, so that a
file written by another user can spoil a run, but not take over the account that resumes it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_file, locked
from stages.runtime.lineage import input_hashes
from stages.runtime.spans import span
from stages.runtime.stage import StageContext


class Checkpoints:
    """Named checkpoints of one stage with its current inputs; `more`: hashes of inputs that are not in dvc.yaml.

    classes: dataclasses allowed in checkpoints besides tensors, numbers, strings, lists, tuples, sets and dicts.
    """

    def __init__(self, context: StageContext, more: Mapping[str, str] | None = None, classes: Sequence[type] = ()) -> None:
        now = input_hashes(context.root, context.name, context.domain)
        key = json.dumps({**now, **context.edited, **(more or {})}, sort_keys=True)
        self.parent = context.root / ".bellwether" / "checkpoints" / context.title
        self.folder = self.parent / hashlib.sha256(key.encode()).hexdigest()[:16]
        self.classes: list[Any] = list(classes)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    @span("files")
    def save(self, name: str, value: Any) -> None:
        """Write `value` atomically. Raises OSError naming the file and the free space, TypeError for a value that `load`
        refuses; an earlier checkpoint then stays."""
        import torch

        path = self.path(name)
        try:
            # Forks and shards may save what all of them need at once, under one partial name.
            with locked(path.with_suffix(".lock"), wait=True), atomic_file(path) as partial:
                with partial.open("wb") as handle:
                    torch.save(value, handle)
                self._check(name, partial)
        except (OSError, RuntimeError) as error:
            free = shutil.disk_usage(self.parent if self.parent.exists() else Path.cwd()).free
            raise OSError(
                f"cannot write checkpoint {path}: {error} ({free / 1e6:.0f} MB free). Make room and run the stage again: "
                f"it goes on from its last good checkpoint"
            ) from error

    def _check(self, name: str, written: Path) -> None:
        """Raise TypeError and remove the file if it contains a type that `load` would refuse."""
        import torch

        with torch.serialization.safe_globals(self.classes):
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(written)
        if foreign:
            written.unlink()
            raise TypeError(
                f"checkpoint '{name}' holds {', '.join(sorted(foreign))}, which can't be loaded; save tensors, numbers, "
                f"strings and containers of these, or name the dataclass in Checkpoints(classes=...)"
            )

    @span("files")
    def load(self, name: str) -> Any | None:
        """The value saved under `name` with the same inputs, or None. A damaged file, or one with other types than `classes`, is
        reported and ignored."""
        import torch

        path = self.path(name)
        if not path.exists():
            return None
        try:
            with torch.serialization.safe_globals(self.classes):
                return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # any damage: the stage can start this part again
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            print(f"checkpoint {path} cannot be read ({reason}); starting this part again", flush=True)
            return None

    def clear(self) -> None:
        """Remove all checkpoints of the stage, also of earlier inputs."""
        shutil.rmtree(self.parent, ignore_errors=True)
