"""Blocks of Markdown that commands write into the documents, wherever their markers are.

A block begins with `<!-- NAME:begin -->` and ends with `<!-- NAME:end -->`. To move a block, move both lines.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from stages.runtime.files import atomic_text

DOCUMENTS = ("*.md", "docs/*.md")
"""Where blocks may be, relative to the checkout."""

Block = Callable[[Path], str]
"""Content of a block, given the document that holds it (relative to the checkout), from which links are resolved."""


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[str]], align: str = "") -> str:
    """A Markdown table; `align` has a letter per column, l or r (default: left). Cells are put on one line, bars escaped."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(re.sub(r"[ \t\n]+", " ", cell).strip(" ").replace("|", "\\|") for cell in cells) + " |"

    rule = "".join("---:|" if letter == "r" else "---|" for letter in align.ljust(len(header), "l"))
    return "\n".join([line(header), f"|{rule}", *map(line, rows)])


def documents(root: Path) -> list[Path]:
    """The documents of the checkout, relative to `root`, sorted."""
    return sorted(path.relative_to(root) for pattern in DOCUMENTS for path in root.glob(pattern))


def link(target: Path | str, document: Path) -> str:
    """The link to `target` in `document`; both are relative to the checkout."""
    return Path(os.path.relpath(target, document.parent)).as_posix()


def block_names(text: str) -> list[str]:
    """The names of the blocks that begin in `text`, in order."""
    return re.findall(r"<!-- ([\w-]+):begin -->", text)


def replace_block(text: str, name: str, content: str, where: str = "the document") -> str:
    """`text` with `content` between the markers of block `name`.

    Raises ValueError, naming `where`, unless each marker occurs once and in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{where} must contain the lines '{begin}' and '{end}', each once and in this order")
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{content.strip()}\n{end}{tail}"


def filled(root: Path, blocks: Mapping[str, Block]) -> dict[Path, str]:
    """The documents that hold one of `blocks`, with these blocks replaced, by path relative to `root`."""
    files: dict[Path, str] = {}
    for document in documents(root):
        text = (root / document).read_text(encoding="utf-8")
        for name in [found for found in block_names(text) if found in blocks]:
            text = files[document] = replace_block(text, name, blocks[name](document), str(document))
    return files


def write_or_check(root: Path, files: Mapping[Path, str], check: bool, command: str) -> int:
    """Write the files that differ from `files`, or with `check` only list them. Returns 1 if `check` found one, else 0."""
    stale = [path for path, text in files.items() if not (root / path).exists() or (root / path).read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"documents: {path} is out of date; run '{command}'", file=sys.stderr)
            continue
        atomic_text(root / path, files[path])
        print(f"documents: wrote {path}")
    return int(check and bool(stale))
