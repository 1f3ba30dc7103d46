"""The expert of demonstrations, and players of several strengths whose games are off-policy training data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Literal

import numpy as np

from stages.environments.wordle.rules import HERE, code_of, codes
from stages.environments.wordle.settings import PlayerName
from stages.environments.wordle.words import WordList
from stages.seeding import stream

if TYPE_CHECKING:
    from stages.environments.wordle.environment import WordleState

MAX_PAIRS = 2**17
"""Limit on the pairs (guess, possible word) that the expert compares; it tries all legal guesses if they stay below it, otherwise
a sample of the possible words."""


def expected_left(array: np.ndarray, guesses: np.ndarray, left: np.ndarray) -> np.ndarray:
    """[guesses] expected number of words that remain after each guess, for a uniform hidden word in `left`: sum over marks of
    n^2 / |left|, without the guess itself. `array`: a list's [words, letters]; `guesses` and `left`: numbers of its words."""
    table = codes(array[guesses], array[left])
    table.sort(axis=1)
    starts = np.concatenate([np.ones((len(table), 1), dtype=bool), table[:, 1:] != table[:, :-1]], axis=1)
    squares = np.array([np.square(np.diff(np.append(np.flatnonzero(row), len(left)))).sum() for row in starts])
    return (squares - np.isin(guesses, left)) / len(left)


def best_guess(words: WordList, left: np.ndarray) -> int:
    """The legal word with the fewest expected words left; ties go to possible words, then to the list's order.

    With too many pairs (see `MAX_PAIRS`), guesses are sampled from the possible words, and the one with most distinct letters.
    """
    # Cached by the letters' numbers: lists of every string differ only in their letters.
    return _best_guess(words.array.tobytes(), words.array.shape, left.tobytes())


@lru_cache(maxsize=4096)
def _best_guess(array_bytes: bytes, shape: tuple[int, int], left_bytes: bytes) -> int:
    array, left = np.frombuffer(array_bytes, dtype=np.int8).reshape(shape), np.frombuffer(left_bytes, dtype=np.int64)
    if len(left) <= 2:
        return int(left[0])
    most = MAX_PAIRS // len(left)
    guesses = np.arange(len(array)) if len(array) <= most else left
    if len(guesses) > most:
        spread = [len(set(word)) for word in array[left].tolist()]
        drawn = stream("wordle.weighed", len(array), len(left)).sample(left.tolist(), most)
        guesses = np.unique([*drawn, left[int(np.argmax(spread))]])
    expected = np.round(expected_left(array, guesses, left), 9)
    return int(guesses[np.lexsort((guesses, ~np.isin(guesses, left), expected))[0]])


@dataclass(frozen=True)
class Player:
    """Which marks a player uses, and how often it errs."""

    uses: Literal["places", "last", "all", "best"]
    """`places`: letters in their place. `last`: these and the marks of the last guess. `all`: all marks. `best`: all marks, to
    choose the most informative guess."""
    slip: float = 0.0
    """Probability of a random legal word."""
    typo: float = 0.0
    """Probability of one random letter, which may make the guess invalid."""


PLAYERS: Mapping[PlayerName, Player] = {
    "novice": Player("places", slip=0.1, typo=0.05),
    "casual": Player("last", slip=0.1, typo=0.02),
    "steady": Player("all", slip=0.05, typo=0.01),
    "expert": Player("best"),
}


def candidates(words: WordList, state: WordleState, uses: str) -> np.ndarray:
    """Numbers of the words consistent with the marks that a player uses."""
    if uses in ("all", "best") or not state.rows:
        return state.left
    fits = np.ones(len(words.words), dtype=bool)
    for guess, marks in state.rows:
        for place, (letter, mark) in enumerate(zip(guess, marks, strict=True)):
            if mark == HERE:
                fits &= words.array[:, place] == words.letters.index(letter)
    if uses == "last":
        guess, marks = state.rows[-1]
        fits &= words.codes([words.index[guess]], words.everything)[0] == code_of(marks)
    return np.flatnonzero(fits)


def choose(name: PlayerName, words: WordList, state: WordleState, rng: Random) -> str:
    """The player's next guess, which may be invalid."""
    player = PLAYERS[name]
    if player.uses == "best":
        return words.words[best_guess(words, state.left)]
    pool = words.everything if rng.random() < player.slip else candidates(words, state, player.uses)
    word = list(words.words[rng.choice(pool.tolist())])
    if rng.random() < player.typo:
        word[rng.randrange(len(word))] = rng.choice(words.letters)
    return "".join(word)
