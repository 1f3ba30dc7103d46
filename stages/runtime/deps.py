"""The code dependencies of each stage of dvc.yaml, computed from imports, which DVC does not follow.

`python -m stages.runtime.deps --check` compares the lists with the imports, `--write` writes them. A dependency is a folder of
stages/ if the stage imports something from each of its subfolders, else the modules and subfolders that it imports. A part's
settings.py is a dependency even if imported only for type checking, since its defaults affect outputs. EXEMPT code does not (a
test checks that), and its imports are not followed.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.runtime.command import command
from stages.runtime.files import atomic_text

ROOT = Path(__file__).resolve().parents[2]
EXEMPT = ("stages/runtime", "stages/tracking", "stages/serving", "stages/params.py", "stages/__init__.py")
"""The environment of stages and the assembly of params.yaml's sections, which change no output."""
FOUND_BY_NAME = ("stages/environments", "stages/algorithms", "stages/merging")
"""Parts with a registry: importing it may load any module of the part."""
OURS = ("stages", "flows", "tests")
"""Packages of this repository."""
COMMANDS = {"__main__.py", "check.py"}
"""Modules of commands, which no stage runs."""


def exempt(path: Path) -> bool:
    return any(path == Path(item) or Path(item) in path.parents for item in EXEMPT)


def module_path(name: str) -> Path | None:
    """File of module `name` ("stages.agent.chat"), relative to the root; None if it is not one of ours."""
    base = Path(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if (ROOT / path).is_file()), None)


def type_checking_lines(tree: ast.Module) -> set[int]:
    """Lines of `if TYPE_CHECKING:` blocks, which import nothing when the program runs."""
    ifs = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    blocks = (node for node in ifs if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    return {
        line for block in blocks for child in block.body for line in range(child.lineno, (child.end_lineno or child.lineno) + 1)
    }


@cache
def _imports(path: Path) -> tuple[frozenset[Path], frozenset[Path]]:
    """See `direct_imports`: without and with those for type checking."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for_types, names, more = type_checking_lines(tree), set[str](), set[str]()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        found = more if node.lineno in for_types else names
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
            continue
        base = node.module or ""
        if node.level:
            base = ".".join([*path.parts[: len(path.parts) - node.level], *filter(None, [node.module])])
        if base.split(".")[0] not in OURS:
            continue
        parts = {f"{base}.{alias.name}" for alias in node.names}
        found.update(parts)
        if not all(module_path(name) for name in parts):
            found.add(base)
    runs, types = ({module_path(name) for name in group if name.split(".")[0] in OURS} for group in (names, more))
    return frozenset(runs - {None, path}), frozenset((runs | types) - {None, path})  # type: ignore[arg-type]


def direct_imports(path: Path, for_types: bool = False) -> frozenset[Path]:
    """Files of this repository that `path` (relative to the root) imports, also within functions, and with `for_types` for type
    checking; not their packages, unless it imports from these."""
    return _imports(path)[for_types]


def source_files(folder: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))


def _with(path: Path) -> Iterable[Path]:
    """Dependencies that follow from using `path`: its imports, settings imported for type checking, and all modules of a part
    with a registry."""
    yield from direct_imports(path)
    yield from (item for item in direct_imports(path, for_types=True) if item.name == "settings.py")
    part = "/".join(path.parts[:2])
    if path.name == "registry.py" and part in FOUND_BY_NAME:
        yield from (item for item in source_files(part) if item.name not in COMMANDS)


def code(stage: str) -> list[Path]:
    """The stage's module and its direct and indirect imports, except empty and exempt files."""
    seen: set[Path] = set()
    waiting = [Path("stages") / f"{stage}.py"]
    while waiting:
        item = waiting.pop()
        if item not in seen and not exempt(item):
            seen.add(item)
            waiting.extend(_with(item))
    return sorted(path for path in seen if (ROOT / path).stat().st_size)


def units(used: Iterable[Path]) -> list[str]:
    """The fewest folders and files that cover `used` without covering an unused subfolder."""
    used = set(used)

    def cover(folder: Path) -> list[str]:
        inside = {path for path in used if folder in path.parents}
        below = sorted(
            {folder / path.relative_to(folder).parts[0] for path in source_files(str(folder)) if path.parent != folder}
        )
        if folder != Path("stages") and all(any(item in path.parents for path in inside) for item in below):
            covers = [cover(item) for item in below]
            if all(found == [str(item)] for found, item in zip(covers, below, strict=True)):
                return [str(folder)]
        return [
            *(str(path) for path in inside if path.parent == folder),
            *(name for item in below if any(item in path.parents for path in inside) for name in cover(item)),
        ]

    return sorted(cover(Path("stages")))


def listed(stages: dict[str, Any], stage: str) -> tuple[list[str], list[str]]:
    """Dependencies of a stage of dvc.yaml: data, code."""
    deps = [str(dep) for dep in stages[stage]["deps"]]
    return [dep for dep in deps if not dep.startswith("stages")], [dep for dep in deps if dep.startswith("stages")]


def wanted(stage: str) -> list[str]:
    """The code dependencies of a stage; all code for the report, which shows code changes."""
    return ["stages"] if stage == "report" else units(code(stage))


def _yaml() -> YAML:
    yaml = YAML()
    yaml.width, yaml.preserve_quotes = 4096, True
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", ""))
    return yaml


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.runtime.deps", description="Code dependencies of the stages in dvc.yaml."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="exit with 1 where dvc.yaml and the imports differ")
    action.add_argument("--write", action="store_true", help="write the lists into dvc.yaml")
    options = parser.parse_args()
    text = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    yaml = _yaml()
    stages = yaml.load(text)["stages"]
    wrong = 0
    for stage in stages:
        (data, found), right = listed(stages, stage), wanted(stage)
        if found == right:
            continue
        wrong += 1
        for sign, names in (("+", set(right) - set(found)), ("-", set(found) - set(right))):
            for name in sorted(names):
                print(f"{stage}: {sign} {name}")
        text = replaced(text, stage, [*data, *right])
    if options.write and wrong:
        atomic_text(ROOT / "dvc.yaml", text)
    elif wrong:
        print("dvc.yaml and the imports differ: run 'python -m stages.runtime.deps --write'", file=sys.stderr)
    return int(bool(wrong and options.check))


def replaced(text: str, stage: str, deps: list[str]) -> str:
    """The text of dvc.yaml with a stage's list of dependencies replaced; everything else, including comments, is unchanged."""
    start = text.index("    deps:\n", text.index(f"\n  {stage}:\n")) + len("    deps:\n")
    end = start
    while text.startswith("      - ", end):
        end = text.index("\n", end) + 1
    return text[:start] + "".join(f"      - {dep}\n" for dep in deps) + text[end:]


if __name__ == "__main__":
    sys.exit(main())
