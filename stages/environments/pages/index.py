"""Full-text search over pages by SQLite's FTS5."""

from __future__ import annotations

import re
import sqlite3

from stages.environments.pages.world import Page, World

TITLE_WEIGHT = 100.0
_WORD = re.compile(r"\w+")


class PageIndex:
    """Ranks pages for a query by BM25, with words reduced to their stems; of pages with equal scores the earlier one comes first.
    It is held in memory. Raises RuntimeError if this Python's SQLite lacks FTS5."""

    def __init__(self, world: World) -> None:
        self.pages = world.pages
        self.by_title = {page.title: page for page in world.pages}
        # An environment is used by one thread at a time, but not always by the one that made it.
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._database.execute("CREATE VIRTUAL TABLE pages USING fts5(title, text, tokenize = 'porter unicode61')")
        except sqlite3.OperationalError as error:
            raise RuntimeError(
                f"this Python's SQLite {sqlite3.sqlite_version} can't search: {error}; use one with FTS5"
            ) from error
        self._database.executemany("INSERT INTO pages VALUES (?, ?)", ((page.title, page.text) for page in world.pages))
        self._database.execute("INSERT INTO pages(pages, rank) VALUES ('rank', ?)", (f"bm25({TITLE_WEIGHT}, 1.0)",))

    def search(self, query: str, count: int) -> list[Page]:
        """At most `count` pages that share a word with `query`, best first. Titles that begin with the query count as a further
        match, so that "Guinea Area" finds Guinea before Equatorial Guinea."""
        words = _WORD.findall(query.lower())
        if not words:
            return []
        match = " OR ".join([*(f'"{word}"' for word in dict.fromkeys(words)), f'title : ^ "{" ".join(words)}"'])
        rows = self._database.execute("SELECT rowid FROM pages WHERE pages MATCH ? ORDER BY rank, rowid LIMIT ?", (match, count))
        return [self.pages[number - 1] for (number,) in rows]
