"""Measures the code base: `python -m tests.code_metrics` prints its size, import cycles, and the files that an extension touches.

Cycles are those of imports at run time, without TYPE_CHECKING blocks and without the packages that importing a module runs.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx as nx

from stages.runtime.deps import ROOT, direct_imports, source_files

PARTS = ("stages", "flows")
MODULE, FUNCTION, README, MEDIAN = 400, 60, 250, 100
"""Largest number of lines: of a module, of a function, of README.md; and of the median module."""


def lines(path: Path) -> int:
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def modules() -> list[Path]:
    return [path for part in PARTS for path in source_files(part)]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of each function in a file."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{path}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def part_of(path: Path) -> str:
    """The folder of a module below stages/, or the module itself if it is in no folder or is a folder's command."""
    if path.name == "__main__.py":
        return str(path)
    return "/".join(path.parts[:2]).removesuffix(".py")


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Strongly connected groups of names, each sorted."""
    graph = nx.DiGraph((start, end) for start, end in edges if start != end)
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def file_edges() -> list[tuple[str, str]]:
    return [(str(path), str(item)) for path in modules() for item in sorted(direct_imports(path))]


def folder_edges() -> list[tuple[str, str]]:
    return sorted({(part_of(Path(start)), part_of(Path(end))) for start, end in file_edges()})


def naming(word: str, *folders: str) -> list[str]:
    """Python, TOML and YAML files below `folders` that contain `word`."""
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")))
    texts = ((path, path.read_text(encoding="utf-8")) for path in files if path.suffix in (".py", ".toml", ".yaml"))
    return [str(path.relative_to(ROOT)) for path, text in texts if re.search(rf"\b{word}\b", text)]


def touched() -> dict[str, list[str]]:
    """Files that an extension consists of, without tests: those of the template package that name it, and for a switch those
    of the core that name `rl.loss.dual_clip`, except methods that set it."""
    template = {"method": "rank_pg", "environment": "maze", "merge method": "largest"}
    found = {f"a new {kind}": naming(name, "examples/plugin") for kind, name in template.items()}
    return {**found, "a new switch": [path for path in naming("dual_clip", "stages", "flows") if "/methods/" not in path]}


def measured() -> dict[str, object]:
    """Everything that the command prints."""
    sizes = {str(path): lines(path) for path in modules()}
    lengths = dict(item for path in modules() for item in functions(path))
    return {
        "modules": len(sizes),
        "lines": sum(sizes.values()),
        "median": statistics.median(sizes.values()),
        f"modules over {MODULE} lines": {path: size for path, size in sizes.items() if size > MODULE},
        f"functions over {FUNCTION} lines": {name: size for name, size in lengths.items() if size > FUNCTION},
        "names in stages/": sorted(path.name for path in (ROOT / "stages").iterdir() if path.name[0] not in "._"),
        "import cycles of files": cycles(file_edges()),
        "import cycles of folders": cycles(folder_edges()),
        "lines of README.md": lines(Path("README.md")),
        "lines of params.yaml": lines(Path("params.yaml")),
        "files to touch": touched(),
    }


if __name__ == "__main__":
    print(json.dumps(measured(), indent=2))
