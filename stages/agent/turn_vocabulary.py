"""The texts of a tokenizer's tokens, and tokens for texts within a turn."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from stages.agent.chat import Chat

ANCHORS = (".", "a", "]", "\n")
"""Texts before which a piece is tokenised, since tokenizers treat the beginning of a text in their own way."""


def _text_of(tokenizer: Any, token: int) -> str:
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    name = tokenizer.convert_ids_to_tokens(token) or ""
    # SentencePiece-like decoders drop the leading blank of the first piece.
    return " " + text if name.startswith("▁") and not text.startswith(" ") else text


class TurnVocabulary:
    """V tokens of a chat's tokenizer, as masks need them."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.end = chat.end_of_turn
        self.size = chat.vocabulary
        tokenizer = chat.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        self.special = np.zeros(self.size, dtype=bool)
        self.special[[token for token in special if token < self.size]] = True
        self.within = lru_cache(4096)(self._within)
        self.continuing = lru_cache(4096)(self._continuing)

    @cached_property
    def texts(self) -> list[str]:
        """The text of each token."""
        return [_text_of(self.chat.tokenizer, token) for token in range(self.size)]

    @cached_property
    def _by_text(self) -> dict[str, int]:
        return {text: token for token, text in reversed(list(enumerate(self.texts))) if text and not self.special[token]}

    def opening(self, text: str) -> tuple[int, ...]:
        """The tokens of a turn that begins with `text`, as the policy would write them."""
        return tuple(self.chat.assistant_tokens(text)[:-1])

    def _within(self, text: str) -> tuple[int, ...]:
        """Tokens of `text` within a turn (`within`, cached). Raises ValueError if the vocabulary can't write it."""
        for anchor in ANCHORS:
            before, both = self.chat.tokens_of(anchor), self.chat.tokens_of(anchor + text)
            rest = both[len(before) :]
            if both[: len(before)] == before and "".join(self.texts[token] for token in rest) == text:
                return tuple(rest)
        tokens, at = [], 0
        while at < len(text):
            longest = next((end for end in range(len(text), at, -1) if text[at:end] in self._by_text), None)
            if longest is None:
                raise ValueError(
                    f"the tokenizer has no token for {text[at]!r} within a turn, which the constraint's {text!r} needs"
                )
            tokens.append(self._by_text[text[at:longest]])
            at = longest
        return tuple(tokens)

    def _continuing(self, text: str) -> np.ndarray:
        """Which tokens begin with `text`, [V] bool (`continuing`, cached)."""
        return np.array([one.startswith(text) for one in self.texts])

    def containing(self, text: str) -> np.ndarray:
        """Which tokens contain `text` after their first character, [V] bool."""
        return np.array([text in one[1:] for one in self.texts])
