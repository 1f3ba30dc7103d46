"""The search tool: BM25 (Lucene's variant, by the bm25s library) over whatever has a title and a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

_WORD = re.compile(r"[a-z0-9]+")
TITLE_WEIGHT = 2
"""A word of the title counts as often, so that a page about Kelmar comes before pages that mention it."""


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Document(Protocol):
    """What can be searched for."""

    @property
    def title(self) -> str: ...

    @property
    def text(self) -> str: ...


D = TypeVar("D", bound=Document)


class SearchIndex(Generic[D]):
    """`pages` in BM25 order for a query; ties go to the page that comes first."""

    def __init__(self, pages: Sequence[D]) -> None:
        import bm25s

        self.pages = tuple(pages)
        self._bm25 = bm25s.BM25(method="lucene")
        self._bm25.index([words(page.title) * (TITLE_WEIGHT - 1) + words(page.text) for page in self.pages], show_progress=False)

    def search(self, query: str, count: int) -> list[D]:
        """At most `count` pages that share a word with `query`, best first; [] if there is none."""
        terms = list(dict.fromkeys(words(query)))
        if not terms:
            return []
        # Rounding makes pages that differ only by the order of a floating-point sum tie.
        scores = np.round(self._bm25.get_scores(terms), 5)
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.pages[index] for index in order if scores[index] > 0]
