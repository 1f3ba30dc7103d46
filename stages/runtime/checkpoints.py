"""Atomic checkpoints and exact resume.

Checkpoints live outside DVC's outputs (DVC deletes those before a stage runs), in a folder named by the hash of the stage's
inputs: changed inputs never resume from old state. They are removed when the stage succeeds.

Reading one runs no code: files hold tensors, plain containers and the dataclasses that their reader names, and nothing else is
made from them. Whoever may write to a shared file system can spoil a run, but not take over the account that resumes it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_file
from stages.runtime.lineage import input_hashes
from stages.runtime.stage import StageContext


class Checkpoints:
    """Named checkpoints of one stage with its present inputs; `more` names inputs that dvc.yaml's entry of the stage does not.

    classes: the dataclasses that checkpoints hold beside tensors, numbers, text, lists, tuples, sets and dicts.
    """

    def __init__(self, context: StageContext, more: Mapping[str, str] | None = None, classes: Sequence[type] = ()) -> None:
        key = json.dumps({**input_hashes(context.root, context.name, context.domain), **(more or {})}, sort_keys=True)
        self.parent = context.root / ".bellwether" / "checkpoints" / context.title
        self.folder = self.parent / hashlib.sha256(key.encode()).hexdigest()[:16]
        self.classes: list[Any] = list(classes)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    def save(self, name: str, value: Any) -> None:
        """Write `value` so that a reader sees the old or the new, never a part.

        Raises OSError naming the file, the space it needs and what to do, and TypeError for a value that `load` would refuse; an
        earlier checkpoint is left as it was.
        """
        import torch

        path = self.path(name)
        try:
            with atomic_file(path) as partial:
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
        """Raises TypeError, and removes the file, if it holds what `load` would refuse: else only the next resume would tell."""
        import torch

        with torch.serialization.safe_globals(self.classes):
            strangers = torch.serialization.get_unsafe_globals_in_checkpoint(written)
        if strangers:
            written.unlink()
            raise TypeError(
                f"checkpoint '{name}' holds {', '.join(sorted(strangers))}, which is not read back; save tensors, numbers, text "
                f"and containers of these, or name the dataclass in Checkpoints(classes=...)"
            )

    def load(self, name: str) -> Any | None:
        """What was saved under `name` with the same inputs, or None. A file that is damaged, or holds anything but data of
        `classes`, is reported and counts as absent."""
        import torch

        path = self.path(name)
        if not path.exists():
            return None
        try:
            with torch.serialization.safe_globals(self.classes):
                return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever bytes there are, the stage can do without them
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            print(f"checkpoint {path} cannot be read ({reason}); starting this part again", flush=True)
            return None

    def clear(self) -> None:
        """The stage is done: remove its checkpoints, those of earlier inputs too."""
        shutil.rmtree(self.parent, ignore_errors=True)
