"""BM25 search (Lucene's variant, from the bm25s library) over documents with a title and a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

_WORD = re.compile(r"[a-z0-9]+")
TITLE_WEIGHT = 2
"""How often a word of the title counts, so that a page about Kelmar ranks above pages that mention it."""


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Document(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def text(self) -> str: ...


D = TypeVar("D", bound=Document)


class SearchIndex(Generic[D]):
    """Ranks `pages` for a query; of pages with equal scores the earlier one comes first."""

    def __init__(self, pages: Sequence[D]) -> None:
        import bm25s

        self.pages = tuple(pages)
        self._bm25 = bm25s.BM25(method="lucene")
        self._bm25.index([words(page.title) * (TITLE_WEIGHT - 1) + words(page.text) for page in self.pages], show_progress=False)

    def search(self, query: str, count: int) -> list[D]:
        """At most `count` pages that share a word with `query`, best first."""
        terms = list(dict.fromkeys(words(query)))
        if not terms:
            return []
        # Rounded, so that pages whose scores differ only by the order of summation tie.
        scores = np.round(self._bm25.get_scores(terms), 5)
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.pages[index] for index in order if scores[index] > 0]
