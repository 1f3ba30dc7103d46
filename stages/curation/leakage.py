"""Finds prompts of frozen panel tasks in texts, comparing words and marks regardless of case and white space."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable

from stages.curation.cleaning import pieces

WHOLE_LINES = 8
"""A prompt of fewer words and marks must fill whole lines to match: "what is 3+4?" is part of many sentences."""


def normalised(text: str) -> tuple[tuple[str, ...], frozenset[int]]:
    """Words and marks of a text (NFKC, lower case), and the positions where its lines begin, including the end."""
    found: list[str] = []
    starts = {0}
    for line in unicodedata.normalize("NFKC", text).casefold().splitlines():
        found += pieces(line)
        starts.add(len(found))
    return tuple(found), frozenset(starts)


class PanelPrompts:
    """The prompts of test tasks that no other split shares; a shared prompt is not a leak, since some domains use one prompt for
    all tasks."""

    def __init__(self, test: Iterable[str], others: Iterable[str]) -> None:
        common = {normalised(prompt)[0] for prompt in others}
        self._by_first: dict[str, dict[tuple[str, ...], str]] = defaultdict(dict)
        for prompt in sorted(set(test)):
            words, _ = normalised(prompt)
            if words and words not in common:
                self._by_first[words[0]].setdefault(words, prompt)

    def find(self, text: str) -> str | None:
        """The first prompt found in `text`, anywhere or, if it is short (WHOLE_LINES), on its own lines; or None."""
        words, starts = normalised(text)
        for place, word in enumerate(words):
            for prompt, original in self._by_first.get(word, {}).items():
                end = place + len(prompt)
                if words[place:end] == prompt and (len(prompt) >= WHOLE_LINES or (place in starts and end in starts)):
                    return original
        return None
