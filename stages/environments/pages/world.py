"""Pages of text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Page:
    title: str
    text: str


@dataclass(frozen=True)
class World:
    """The pages that an environment reads; no two have the same title."""

    pages: tuple[Page, ...]

    def to_json(self) -> str:
        return json.dumps([asdict(page) for page in self.pages], ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> World:
        return cls(tuple(Page(page["title"], page["text"]) for page in json.loads(text)))
