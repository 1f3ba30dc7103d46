"""What a module of this repository imports, read from its source: the basis of the tests on dependencies and arrows."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def module_path(name: str) -> Path | None:
    """File of module `name` ("stages.agent.chat"), relative to the root; None if it is not one of ours."""
    base = Path(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if (ROOT / path).exists():
            return path
    return None


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _type_checking_lines(tree: ast.Module) -> set[int]:
    """Lines of `if TYPE_CHECKING:` blocks, which import nothing when the program runs."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for child in node.body:
                lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return lines


@cache
def direct_imports(path: Path) -> frozenset[Path]:
    """Files of ours that the file `path` (relative to the root) imports anywhere, inside functions too; not the packages that
    they lie in, unless it imports from these."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    skipped = _type_checking_lines(tree)
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node.lineno not in skipped:
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.lineno not in skipped:
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module or ""
            )
            parts = {f"{base}.{alias.name}" for alias in node.names}
            names.update(parts)
            if not all(module_path(name) for name in parts):
                names.add(base)
    found = {module_path(name) for name in names if name.split(".")[0] in ("stages", "flows", "tests")}
    return frozenset({item for item in found if item is not None} - {path})


@cache
def imports(path: Path) -> frozenset[Path]:
    """`direct_imports`, and the packages that these lie in: importing a module runs them."""
    ours = direct_imports(path)
    packages = {folder / "__init__.py" for item in ours for folder in item.parents if (ROOT / folder / "__init__.py").exists()}
    return frozenset((ours | packages) - {path, Path("__init__.py")})


def closure(path: Path, without: frozenset[Path] = frozenset()) -> set[Path]:
    """All files of ours that `path` imports, directly or not, itself included; does not look into `without`."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        item = waiting.pop()
        if item in seen or item in without:
            continue
        seen.add(item)
        waiting.extend(imports(item))
    return seen


def source_files(folder: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
