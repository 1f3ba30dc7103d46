"""Keeps folders of domains that `domains` no longer lists out of what the joining stages read, and so out of their hashes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path


def keep_only(root: Path, domains: Sequence[str], folders: Iterable[str]) -> list[Path]:
    """Remove what belongs to no listed domain from `folders` (relative to `root`), saying so; returns what was removed.

    A stage that joins the domains has their common folder as its DVC dependency, since DVC cannot loop over dependencies; what a
    domain that is gone left there would change that folder's hash. Nothing is lost: DVC's cache holds it, and listing the
    domain again brings it back. A domain's entries are the folder `<domain>` and the files `<domain>.*` and `<domain>_history.*`.
    """
    removed = []
    for folder in folders:
        for path in sorted((root / folder).glob("*")):
            folder_like = path.is_dir() and not path.is_symlink()
            if (path.name if folder_like else path.stem.removesuffix("_history")) in domains:
                continue
            if folder_like:
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path)
            print(f"removed {folder}/{path.name}: not one of the domains {', '.join(domains)}", flush=True)
    return removed
