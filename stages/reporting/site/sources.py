"""The site's pages in a folder that Sphinx reads: README.md, docs/, the methods' pages and the board; links resolve there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stages.claims.experiment import FOLDER as BOARD
from stages.reporting.board.rows import entries
from stages.reporting.diagram import pipeline_graph
from stages.reporting.generated_blocks import markdown_table
from stages.reporting.site.methods import method_pages
from stages.runtime.yaml_files import read_yaml

CHAPTERS: Mapping[str, Sequence[str]] = {
    "First steps": ("docs/tutorial", "docs/usage", "docs/configuration", "docs/results", "docs/troubleshooting"),
    "Methods": (
        "docs/methods",
        "docs/annotation",
        "docs/values",
        "docs/design-search",
        "docs/control",
        "docs/constraints",
        "docs/thinking",
        "docs/judges",
        "docs/guidance",
        "docs/instructions",
    ),
    "Environments and models": ("docs/environments", "docs/base-model", "docs/families", "docs/sandbox", "docs/exchange"),
    "Tools": ("docs/dvc", "docs/mlflow", "docs/prefect", "docs/serving", "docs/conversion", "docs/cluster"),
    "Extend": ("docs/extending", "CONTRIBUTING"),
    "Reference": ("docs/params", "docs/guarantees", "docs/benchmarks"),
}
"""The navigation. Pages of docs/ that it does not list come last, under "More"."""
PICTURES = ("docs/**/*.svg", "docs/**/*.png", f"{BOARD}/**/*.svg")
EXTRA = "extra"
"""Folder of what pages refer to in HTML, which Sphinx copies as it is."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def _toctree(caption: str, pages: Iterable[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def _retarget(text: str, page: Path, root: Path, pages: set[Path]) -> str:
    """`text` with links that hold in the site: README.md is its index, and what is no page of it is named instead of linked."""

    def replaced(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        file = Path(os.path.normpath(page.parent / path))
        if file == Path("README.md"):
            path = Path(os.path.relpath("index.md", page.parent)).as_posix()
        elif file not in pages and not picture:
            if not (root / file).exists():
                raise FileNotFoundError(f"{page}: the link to {target} leads nowhere")
            return words if words.strip("`") == file.as_posix() else f"{words} (`{file}`)"
        return f"{picture}[{words}]({path}{'#' * bool(anchor)}{anchor})"

    return LINK.sub(replaced, text)


def _pipeline(root: Path) -> str:
    """The stages as a table, in place of the diagram, which a browser without a network can't draw."""
    entries = read_yaml(root / "dvc.yaml")["stages"]
    graph, place = pipeline_graph(root), {name: number for number, name in enumerate(entries)}
    lines = (
        (
            f"`{name}@domain`" if "matrix" in entry else f"`{name}`",
            entry["desc"],
            ", ".join(f"`{one}`" for one in sorted(graph.predecessors(name), key=place.__getitem__)),
        )
        for name, entry in entries.items()
        if name in graph  # not one whose matrix is empty
    )
    return markdown_table(("stage", "what it does", "reads"), lines)


def _page(text: str, page: Path, root: Path, pages: set[Path]) -> str:
    text = re.sub(r"```mermaid\n.*?\n```", lambda match: _pipeline(root), text, flags=re.DOTALL)
    return _retarget(text, page, root, pages)


def gather(root: Path, target: Path) -> list[Path]:
    """Write the sources of the site into the new folder `target`; the pages.

    Raises FileNotFoundError for a link to a file that does not exist, ParamsError for an invalid experiment.
    """
    families, figures = method_pages(root, entries(root))
    read = [*root.glob("*.md"), *(root / "docs").glob("*.md"), *(root / BOARD).glob("*.md")]
    texts = {path.relative_to(root): path.read_text(encoding="utf-8") for path in sorted(read)}
    texts |= {path: text for of_family in families.values() for path, text in of_family.items()}
    pages = {Path("index.md") if path == Path("README.md") else path for path in texts}
    index = _page(texts.pop(Path("README.md")), Path("README.md"), root, pages)
    listed = {f"{name}.md" for names in CHAPTERS.values() for name in names}
    more = [path.with_suffix("").as_posix() for path in sorted(texts) if path.parts[0] == "docs" and len(path.parts) == 2]
    chapters = {**CHAPTERS, "More": [name for name in more if f"{name}.md" not in listed]}
    for family, of_family in families.items():
        chapters[family] = [path.with_suffix("").as_posix() for path in of_family]
    board = [path.with_suffix("").as_posix() for path in sorted(texts) if path.parent == BOARD]
    chapters["Evidence"] = sorted(board, key=lambda name: (not name.endswith("/README"), name))
    known = {path.with_suffix("").as_posix() for path in texts}
    for caption, names in chapters.items():
        if present := [name for name in names if name in known]:
            index += _toctree(caption, present)
    for path, text in {**texts, Path("index.md"): index}.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text if path.name == "index.md" else _page(text, path, root, pages), encoding="utf-8")
    for path, svg in figures.items():
        (target / path.parent).mkdir(parents=True, exist_ok=True)
        (target / path).write_text(svg, encoding="utf-8")
    for picture in sorted(path.relative_to(root) for pattern in PICTURES for path in root.glob(pattern)):
        for folder in (target, target / EXTRA):
            (folder / picture.parent).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / picture, folder / picture)
    return sorted(pages)
