"""Whether a text tells a task of the frozen panel: its words and marks are compared, whatever their case and the white space
between them."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable

from stages.curation.cleaning import pieces

WHOLE_LINES = 8
"""A prompt of fewer words and marks counts only where it fills whole lines: "what is 3+4?" is part of many a sentence."""


def normalised(text: str) -> tuple[tuple[str, ...], frozenset[int]]:
    """Words and marks of a text, its compatibility characters (full width and the like) made plain and all in lower case, and the
    places at which its lines begin, the end's among them."""
    found: list[str] = []
    starts = {0}
    for line in unicodedata.normalize("NFKC", text).casefold().splitlines():
        found += pieces(line)
        starts.add(len(found))
    return tuple(found), frozenset(starts)


class PanelPrompts:
    """The prompts that test tasks alone have. Some domains tell every task in the same words: a prompt that another split has as
    well gives nothing away."""

    def __init__(self, test: Iterable[str], others: Iterable[str]) -> None:
        common = {normalised(prompt)[0] for prompt in others}
        self._by_first: dict[str, dict[tuple[str, ...], str]] = defaultdict(dict)
        for prompt in sorted(set(test)):
            words, _ = normalised(prompt)
            if words and words not in common:
                self._by_first[words[0]].setdefault(words, prompt)

    def told(self, text: str) -> str | None:
        """The first prompt that stands in `text`: anywhere, or if it is short (WHOLE_LINES) on lines of its own; or None."""
        words, starts = normalised(text)
        for place, word in enumerate(words):
            for prompt, original in self._by_first.get(word, {}).items():
                end = place + len(prompt)
                if words[place:end] == prompt and (len(prompt) >= WHOLE_LINES or (place in starts and end in starts)):
                    return original
        return None
