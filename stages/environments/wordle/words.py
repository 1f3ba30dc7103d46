"""Lists of words: made by seed of a few letters, or the packaged English ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path

import numpy as np

from stages.environments.base_domain import SHARES
from stages.environments.wordle.rules import codes
from stages.environments.wordle.settings import LETTERS, Level, Spelling
from stages.records.task import SPLITS, Split
from stages.seeding import key64, stream

ENGLISH = Path(__file__).with_name("english.txt")


_NAMES = """
    ant bell coin drum egg fish goat hill ivy jar kite lamp moon nest owl pear queen ring star tree uncle vase wolf xray yard
    zebra
"""
NAMES = {name[0]: name for name in _NAMES.split()}
"""A spelling alphabet. Names of consonants are single tokens of the shipped base model, which has read them often; single letters
it has hardly met."""
_LETTERS = {name: letter for letter, name in NAMES.items()}


def spell(word: str, spelling: Spelling) -> str:
    """A word as it is shown and written, letter by letter, so that a tokenizer does not join them: b d f, or bell drum fish."""
    return " ".join(NAMES[letter] for letter in word) if spelling == "names" else " ".join(word)


def read(text: str, spelling: Spelling) -> str:
    """The word that a guess stands for, in any case, its letters apart or joined."""
    parts = text.lower().split()
    return "".join(_LETTERS.get(part, part) for part in parts) if spelling == "names" else "".join(parts)


@dataclass(frozen=True)
class WordList:
    """Legal words; the hidden one is among them."""

    letters: str
    """Those that words are made of, in the order in which the agent reads them."""
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
        """The numbers of all words: what is possible before the first guess."""
        return np.arange(len(self.words))

    def codes(self, guesses: Sequence[int] | np.ndarray, left: np.ndarray) -> np.ndarray:
        """[guesses, left] codes of words by number."""
        return codes(self.array[np.asarray(guesses, dtype=np.int64)], self.array[left])

    def to_json(self) -> str:
        return json.dumps({"letters": self.letters, "words": list(self.words)}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> WordList:
        """Raises ValueError (json.JSONDecodeError), KeyError or TypeError for text that `to_json` did not write."""
        data = json.loads(text)
        return cls(data["letters"], tuple(data["words"]))


@lru_cache(maxsize=128)
def every_word(letters: str, length: int) -> WordList:
    """All strings of `length` of these letters, those of the first letters first."""
    return WordList(letters, tuple("".join(word) for word in product(letters, repeat=length)))


@lru_cache(maxsize=1)
def english_words() -> tuple[str, ...]:
    """The packaged words, sorted: common ones of four and five letters."""
    return tuple(sorted(ENGLISH.read_text(encoding="utf-8").split()))


@lru_cache(maxsize=128)
def make_list(level: Level, seed: int) -> WordList:
    """The list that `seed` draws for `level`: first its letters, then, where it does not hold them all, its words.

    Raises ValueError if there are fewer English words of that length than the level asks for.
    """
    rng = stream("wordle.list", level.source, level.letters, level.alphabet, level.size, seed)
    if level.source == "english":
        words = tuple(word for word in english_words() if len(word) == level.letters)
        if not words or (level.size or 1) > len(words):
            raise ValueError(
                f"there are {len(words)} English words of {level.letters} letters here; {level.size or 'some'} asked for"
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
    place = key64("wordle.split", word) % sum(SHARES.values())
    for split in SPLITS:
        place -= SHARES[split]
        if place < 0:
            return split
    raise AssertionError("shares add up to their sum")
