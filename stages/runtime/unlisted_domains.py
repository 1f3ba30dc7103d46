"""Removes folders of unlisted domains from the inputs of stages that join domains, and so from their hashes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path


def keep_only(root: Path, domains: Sequence[str], folders: Iterable[str]) -> None:
    """Remove and print entries of `folders` (relative to `root`) that belong to no listed domain.

    DVC cannot loop over dependencies, so a stage that joins domains depends on their common folder, whose hash a removed domain's
    files would change. They stay in DVC's cache and return when the domain is listed again. A domain's entries are the folder
    `<domain>` and the files `<domain>.*` and `<domain>_history.*`.
    """
    for folder in folders:
        for path in sorted((root / folder).glob("[!.]*")):
            is_folder = path.is_dir() and not path.is_symlink()
            if (path.name if is_folder else path.stem.removesuffix("_history")) in domains:
                continue
            if is_folder:
                shutil.rmtree(path)
            else:
                path.unlink()
            print(f"removed {folder}/{path.name}: not one of the domains {', '.join(domains)}", flush=True)
