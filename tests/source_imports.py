"""Imports between modules of this repository, including the packages that contain them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stages.runtime.deps import ROOT, direct_imports, exempt, module_path, source_files, type_checking_lines

__all__ = ["ROOT", "closure", "direct_imports", "exempt", "imports", "module_path", "source_files", "type_checking_lines"]


@cache
def imports(path: Path) -> frozenset[Path]:
    """`direct_imports` and the packages that contain them, which importing a module runs."""
    ours = direct_imports(path)
    packages = {folder / "__init__.py" for item in ours for folder in item.parents if (ROOT / folder / "__init__.py").exists()}
    return frozenset((ours | packages) - {path, Path("__init__.py")})


def closure(path: Path) -> set[Path]:
    """All files of this repository that `path` imports, directly or indirectly, and itself; exempt files are not followed."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        item = waiting.pop()
        if item not in seen and not exempt(item):
            seen.add(item)
            waiting.extend(imports(item))
    return seen
