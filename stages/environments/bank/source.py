"""Reads the documents and requests of tau2's domain banking_knowledge from a wheel of the package inspect-evals (MIT)."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from stages.environments.pages.world import Page

INSIDE = "inspect_evals/tau2/data/domains/banking_knowledge/"
DOCUMENTS, SOURCE = "documents.jsonl", "source.json"
_MARKS = re.compile(r"[*#_`]+")


def plain(text: str) -> str:
    """Text without Markdown's marks, with single spaces."""
    return " ".join(_MARKS.sub(" ", text).split())


def read_wheel(wheel: Path) -> tuple[dict[str, Page], list[dict[str, Any]], dict[str, Any]]:
    """Documents by id, raw records sorted by id, and the wheel's name, version and SHA-256. Documents with the same title get
    numbers. Raises ValueError for another file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            pages = _pages(json.loads(gzip.decompress(archive.read(f"{INSIDE}documents.json.gz"))))
            records = _records(json.loads(archive.read(f"{INSIDE}tasks.json")))
    except (zipfile.BadZipFile, gzip.BadGzipFile, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{wheel} is not a wheel with tau2's domain banking_knowledge ({error}); make it with 'pip download --no-deps "
            f"inspect-evals==0.28.0'"
        ) from error
    name, _, others = wheel.stem.partition("-")
    version = others.partition("-")[0]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return pages, records, {"package": name, "version": version, "sha256": digest, "licence": "MIT"}


def _pages(documents: list[dict[str, Any]]) -> dict[str, Page]:
    """Documents by id, with Markdown's marks removed; those with the same title get numbers."""
    titles, seen = Counter(document["title"] for document in documents), Counter[str]()
    pages = {}
    for document in sorted(documents, key=lambda document: document["id"]):
        title = document["title"]
        seen[title] += 1
        number = f" ({seen[title]})" if titles[title] > 1 else ""
        pages[document["id"]] = Page(f"{plain(title)}{number}", plain(document["content"]))
    return pages


def _records(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raw records of the requests, sorted by id."""
    return [
        {
            "task_id": f"bank-{request['id']}",
            "split": "test",
            "situation": plain(request["user_scenario"]["instructions"]),
            "required": sorted(set(request["required_documents"])),
        }
        for request in sorted(requests, key=lambda request: request["id"])
    ]


def document_lines(pages: dict[str, Page]) -> str:
    rows = ({"id": name, "title": page.title, "text": page.text} for name, page in pages.items())
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_documents(folder: Path) -> dict[str, Page]:
    """Documents by id, as the import wrote them. Raises FileNotFoundError."""
    path = folder / DOCUMENTS
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: the bank's documents are not shipped; download the wheel with 'pip download --no-deps "
            f"inspect-evals==0.28.0', and import it with 'python -m stages.environments.bank WHEEL'"
        )
    rows = map(json.loads, path.read_bytes().splitlines())
    return {row["id"]: Page(row["title"], row["text"]) for row in rows}
