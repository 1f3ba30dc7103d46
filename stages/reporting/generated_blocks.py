"""Blocks of Markdown that commands write into the documents, wherever their markers stand.

A block begins with `<!-- NAME:begin -->` and ends with `<!-- NAME:end -->`. Moving both lines to another
document moves the block.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from stages.runtime.files import atomic_text

DOCUMENTS = ("*.md", "docs/*.md")
"""Where blocks may stand, relative to the checkout."""

Block = Callable[[Path], str]
"""From the document that a block stands in, relative to the checkout, to the block's content; links lead from that document."""


def documents(root: Path) -> list[Path]:
    """The documents of the checkout, relative to `root`, sorted."""
    return sorted(path.relative_to(root) for pattern in DOCUMENTS for path in root.glob(pattern))


def link(target: Path | str, document: Path) -> str:
    """The address of `target` as a link in `document`; both are relative to the checkout."""
    return Path(os.path.relpath(target, document.parent)).as_posix()


def block_names(text: str) -> list[str]:
    """The names of the blocks that begin in `text`, in order."""
    return re.findall(r"<!-- ([\w-]+):begin -->", text)


def replace_block(text: str, name: str, content: str, where: str = "the document") -> str:
    """`text` with `content` between the markers of block `name`.

    Raises ValueError, naming `where`, unless both markers stand there once and in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"{where} needs the lines '{begin}' and '{end}', each once and in this order; add them where the block belongs"
        )
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{content.strip()}\n{end}{tail}"


def filled(root: Path, blocks: Mapping[str, Block]) -> dict[Path, str]:
    """What each document that holds one of `blocks` should be, by path relative to `root`. Other blocks stay as they are."""
    files: dict[Path, str] = {}
    for document in documents(root):
        text = (root / document).read_text(encoding="utf-8")
        for name in [found for found in block_names(text) if found in blocks]:
            text = files[document] = replace_block(text, name, blocks[name](document), str(document))
    return files


def write_or_check(root: Path, files: Mapping[Path, str], check: bool, command: str) -> int:
    """Write the files that differ from `files`; with `check` only name them. Returns 1 if `check` found one, else 0."""
    stale = [path for path, text in files.items() if not (root / path).exists() or (root / path).read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"documents: {path} is out of date; run '{command}'", file=sys.stderr)
            continue
        atomic_text(root / path, files[path])
        print(f"documents: wrote {path}")
    return int(check and bool(stale))
