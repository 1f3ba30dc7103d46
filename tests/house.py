"""The house in numbers: `python -m tests.house` prints sizes, circles of imports, and the lines of README and params.yaml.

Circles are read from imports that run with the program, those under TYPE_CHECKING aside. A package's `__init__.py` is a file like
others: that importing a module runs it makes no circle.
"""

from __future__ import annotations

import ast
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx as nx

from stages.runtime.deps import ROOT, direct_imports, source_files

PARTS = ("stages", "flows")
MODULE, FUNCTION, README, MEDIAN = 400, 60, 250, 100
"""Most lines of a module, a function and README.md; of half of the modules."""


def lines(path: Path) -> int:
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def modules() -> list[Path]:
    return [path for part in PARTS for path in source_files(part)]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of each function in a file."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{path}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def room(path: Path) -> str:
    """The folder of a module below stages/, or the module itself where it lies beside them or is its folder's command."""
    if path.name == "__main__.py":
        return str(path)
    return "/".join(path.parts[:2]).removesuffix(".py")


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of names that reach one another, each sorted."""
    graph = nx.DiGraph((start, end) for start, end in edges if start != end)
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def file_edges() -> list[tuple[str, str]]:
    return [(str(path), str(item)) for path in modules() for item in sorted(direct_imports(path))]


def folder_edges() -> list[tuple[str, str]]:
    return sorted({(room(Path(start)), room(Path(end))) for start, end in file_edges()})


def measured() -> dict[str, object]:
    """Every number that this prints."""
    sizes = {str(path): lines(path) for path in modules()}
    lengths = dict(item for path in modules() for item in functions(path))
    return {
        "modules": len(sizes),
        "lines": sum(sizes.values()),
        "median": statistics.median(sizes.values()),
        f"modules over {MODULE} lines": {path: size for path, size in sizes.items() if size > MODULE},
        f"functions over {FUNCTION} lines": {name: size for name, size in lengths.items() if size > FUNCTION},
        "names in stages/": sorted(path.name for path in (ROOT / "stages").iterdir() if path.name[0] not in "._"),
        "circles of files": circles(file_edges()),
        "circles of folders": circles(folder_edges()),
        "lines of README.md": lines(Path("README.md")),
        "lines of params.yaml": lines(Path("params.yaml")),
    }


if __name__ == "__main__":
    print(json.dumps(measured(), indent=2))
