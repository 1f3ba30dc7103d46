"""A registered version holds no weights but a DVC file that names them: `dvc pull` or `dvc checkout` of it brings them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from stages.runtime.files import atomic_text
from stages.runtime.lineage import tracked_files


def write_pointer(target: Path, folder: Path, digest: str) -> Path:
    """`target/<folder's name>.dvc`, as `dvc add` would write it for `folder` with hash `digest`; returns its path."""
    files = tracked_files(folder)
    entry: dict[str, Any] = {
        "md5": digest,
        "size": sum(item.stat().st_size for item in files),
        "nfiles": len(files),
        "hash": "md5",
        "path": folder.name,
    }
    path = target / f"{folder.name}.dvc"
    atomic_text(path, yaml.safe_dump({"outs": [entry]}, sort_keys=False))
    return path
