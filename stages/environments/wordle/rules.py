"""Wordle's rules: how a guess is marked, repeated letters included.

A letter in its place is `here`. Each other letter, from left to right, is `in` while the word has an occurrence of it that is
neither `here` nor claimed by an earlier `in`; otherwise it is `not`. So if a guess has two e and the word one, at most one is
`in`. (LMRL-Gym, arXiv 2311.18232, marks every letter that the word contains, however often it was guessed.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

HERE, IN, NOT = "here", "in", "not"
MARKS = (NOT, IN, HERE)
"""By their digit in a code."""


def marks_of(guess: str, word: str) -> tuple[str, ...]:
    """The mark of each letter of `guess`. Raises ValueError for different lengths."""
    if len(guess) != len(word):
        raise ValueError(f"'{guess}' and '{word}' differ in length")
    left = Counter(right for letter, right in zip(guess, word, strict=True) if letter != right)
    marks = []
    for letter, right in zip(guess, word, strict=True):
        if letter == right:
            marks.append(HERE)
        elif left[letter]:
            left[letter] -= 1
            marks.append(IN)
        else:
            marks.append(NOT)
    return tuple(marks)


def code_of(marks: Sequence[str]) -> int:
    """Marks as a number in base 3, the first letter's digit first."""
    return int("".join(str(MARKS.index(mark)) for mark in marks), 3)


def codes(guesses: np.ndarray, words: np.ndarray) -> np.ndarray:
    """[G, W] int32 codes of every guess [G, L] for every word [W, L]; letters are small integers."""
    length = guesses.shape[1]
    result = np.zeros((len(guesses), len(words)), dtype=np.int32)
    right = [guesses[:, None, place] == words[None, :, place] for place in range(length)]
    for place in range(length):
        letter = guesses[:, place]
        # Occurrences of the letter in the word that are not `here`, and earlier letters of the guess that claim one.
        spare = np.zeros(result.shape, dtype=np.int8)
        claimed = np.zeros(result.shape, dtype=np.int8)
        for other in range(length):
            same = (guesses[:, other] == letter)[:, None]
            spare += (words[None, :, other] == letter[:, None]) & ~same
            if other < place:
                claimed += same & ~right[other]
        result = 3 * result + np.where(right[place], 2, claimed < spare)
    return result
