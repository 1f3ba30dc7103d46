"""Word lists: drawn by seed from a few letters, or packaged English words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path

import numpy as np

from stages.environments.base_domain import SHARES, hashed_split
from stages.environments.wordle.rules import codes
from stages.environments.wordle.settings import LETTERS, Level, Spelling
from stages.records.task import Split
from stages.seeding import stream

ENGLISH = Path(__file__).with_name("english.txt")
_NAMES = """
    ant bell coin drum egg fish goat hill ivy jar kite lamp moon nest owl pear queen ring star tree uncle vase wolf xray yard
    zebra
"""
NAMES = {name[0]: name for name in _NAMES.split()}
"""A spelling alphabet. The consonants' names are single tokens that the shipped base model has often seen, unlike letters."""
_LETTERS = {name: letter for letter, name in NAMES.items()}


def spell(word: str, spelling: Spelling) -> str:
    """A word letter by letter, so that a tokenizer does not join letters: b d f, or bell drum fish."""
    return " ".join(NAMES[letter] for letter in word) if spelling == "names" else " ".join(word)


def read(text: str, spelling: Spelling) -> str:
    """The word in a guess, in any case, with its letters apart or joined."""
    parts = text.lower().split()
    return "".join(_LETTERS.get(part, part) for part in parts) if spelling == "names" else "".join(parts)


@dataclass(frozen=True)
class WordList:
    """The legal words, one of which is hidden."""

    letters: str
    """The letters of the words, in the order shown to the agent."""
    words: tuple[str, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    @cached_property
    def array(self) -> np.ndarray:
        """[words, letters] int8."""
        return np.array([[self.letters.index(letter) for letter in word] for word in self.words], dtype=np.int8)

    @cached_property
    def everything(self) -> np.ndarray:
        """The numbers of all words."""
        return np.arange(len(self.words))

    def codes(self, guesses: Sequence[int] | np.ndarray, left: np.ndarray) -> np.ndarray:
        """Codes [guesses, left] of words given by number."""
        return codes(self.array[np.asarray(guesses, dtype=np.int64)], self.array[left])

    def to_json(self) -> str:
        return json.dumps({"letters": self.letters, "words": list(self.words)}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> WordList:
        """The inverse of `to_json`. Raises ValueError (json.JSONDecodeError), KeyError or TypeError for other text."""
        data = json.loads(text)
        return cls(data["letters"], tuple(data["words"]))


@lru_cache(maxsize=128)
def every_word(letters: str, length: int) -> WordList:
    """All strings of `length` of these letters, in their order."""
    return WordList(letters, tuple("".join(word) for word in product(letters, repeat=length)))


@lru_cache(maxsize=1)
def english_words() -> tuple[str, ...]:
    """The packaged words, sorted: common words of four and five letters."""
    return tuple(sorted(ENGLISH.read_text(encoding="utf-8").split()))


@lru_cache(maxsize=128)
def make_list(level: Level, seed: int) -> WordList:
    """The list that `seed` draws for `level`: its letters, then its words unless it has all.

    Raises ValueError if there are fewer English words of that length than the level requests.
    """
    rng = stream("wordle.list", level.source, level.letters, level.alphabet, level.size, seed)
    if level.source == "english":
        words = tuple(word for word in english_words() if len(word) == level.letters)
        if not words or (level.size or 1) > len(words):
            raise ValueError(
                f"there are only {len(words)} English words of {level.letters} letters; {level.size or 'some'} are requested"
            )
        letters = "abcdefghijklmnopqrstuvwxyz"
    else:
        letters = "".join(rng.sample(LETTERS, level.alphabet))
        if level.size is None:
            return every_word(letters, level.letters)
        words = every_word(letters, level.letters).words
    chosen = set(words if level.size is None else rng.sample(words, level.size))
    return WordList(letters, tuple(word for word in words if word in chosen))


def split_of(word: str) -> Split:
    """The split whose tasks may hide `word`, whatever the list."""
    return hashed_split(SHARES, "wordle.split", word)
