"""Wordle's rules: how a guess is marked, also where letters repeat, and which words fit what was said.

A letter in its place is `here`. Each other letter, from left to right, is `in` as long as the word has one of it left that is
neither `here` nor claimed by an `in` before; else it is `not`. So of two e guessed for a word with one e, one at most is `in`.
(LMRL-Gym, arXiv 2311.18232, marks every letter that the word has as in it, however often it was guessed.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

HERE, IN, NOT = "here", "in", "not"
MARKS = (NOT, IN, HERE)
"""By the digit that stands for each in a code."""


def marks_of(guess: str, word: str) -> tuple[str, ...]:
    """The mark of each letter of `guess`. Raises ValueError for lengths that differ."""
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
    """Marks as one number: digits of base 3, the first letter's the highest."""
    code = 0
    for mark in marks:
        code = 3 * code + MARKS.index(mark)
    return code


def codes(guesses: np.ndarray, words: np.ndarray) -> np.ndarray:
    """[G, W] int32 codes of every guess [G, L] for every word [W, L]; letters are small integers."""
    length = guesses.shape[1]
    result = np.zeros((len(guesses), len(words)), dtype=np.int32)
    right = [guesses[:, None, place] == words[None, :, place] for place in range(length)]
    for place in range(length):
        letter = guesses[:, place]
        # How many of the letter the word has that are not `here`, and how many guessed before this one want them.
        spare = np.zeros(result.shape, dtype=np.int8)
        wanted = np.zeros(result.shape, dtype=np.int8)
        for other in range(length):
            same = (guesses[:, other] == letter)[:, None]
            spare += (words[None, :, other] == letter[:, None]) & ~same
            if other < place:
                wanted += same & ~right[other]
        result = 3 * result + np.where(right[place], 2, wanted < spare)
    return result
