"""Who plays: the expert of demonstrations, and players of several strengths whose games are records to learn from off-policy."""

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

WEIGHED = 2**17
"""Pairs of a guess and a possible word that are looked at, at most: all legal guesses where they are not more, else as many of
the possible words as fit."""


def expected_left(array: np.ndarray, guesses: np.ndarray, left: np.ndarray) -> np.ndarray:
    """[guesses] words that remain on average after each guess, all of `left` being as likely: sum over marks of n^2 / |left|, the
    guess itself not counting where it is the word. `array` [words, letters] is a list's; the others are numbers of its words."""
    table = codes(array[guesses], array[left])
    table.sort(axis=1)
    starts = np.concatenate([np.ones((len(table), 1), dtype=bool), table[:, 1:] != table[:, :-1]], axis=1)
    squares = np.array([np.square(np.diff(np.append(np.flatnonzero(row), len(left)))).sum() for row in starts])
    return (squares - np.isin(guesses, left)) / len(left)


def best_guess(words: WordList, left: np.ndarray) -> int:
    """The legal word that leaves the fewest on average; of equals a possible one, then the first in the list's order.

    Where there are too many pairs (see `WEIGHED`), guesses are drawn among the possible words, and the first of those that repeat
    no letter joins them.
    """
    # Lists of every string are alike but for the names of their letters, and the first turns of their games the same.
    return _best_guess(words.array.tobytes(), words.array.shape, left.tobytes())


@lru_cache(maxsize=4096)
def _best_guess(array_bytes: bytes, shape: tuple[int, int], left_bytes: bytes) -> int:
    array, left = np.frombuffer(array_bytes, dtype=np.int8).reshape(shape), np.frombuffer(left_bytes, dtype=np.int64)
    if len(left) <= 2:
        return int(left[0])
    most = WEIGHED // len(left)
    guesses = np.arange(len(array)) if len(array) <= most else left
    if len(guesses) > most:
        spread = [len(set(word)) for word in array[left].tolist()]
        drawn = stream("wordle.weighed", len(array), len(left)).sample(left.tolist(), most)
        guesses = np.unique([*drawn, left[int(np.argmax(spread))]])
    expected = np.round(expected_left(array, guesses, left), 9)
    return int(guesses[np.lexsort((guesses, ~np.isin(guesses, left), expected))[0]])


@dataclass(frozen=True)
class Player:
    """What a player heeds, and how often it fails to."""

    heeds: Literal["places", "last", "all", "best"]
    """Letters found in their place; the marks of the last guess, and those letters; all marks; all marks, and looks for the guess
    that tells most."""
    slip: float = 0.0
    """Chance of any legal word instead."""
    typo: float = 0.0
    """Chance that one letter becomes another, which need not be a word."""


PLAYERS: Mapping[PlayerName, Player] = {
    "novice": Player("places", slip=0.1, typo=0.05),
    "casual": Player("last", slip=0.1, typo=0.02),
    "steady": Player("all", slip=0.05, typo=0.01),
    "expert": Player("best"),
}


def heeded(words: WordList, state: WordleState, heeds: str) -> np.ndarray:
    """Numbers of the words that agree with what a player heeds."""
    if heeds in ("all", "best") or not state.rows:
        return state.left
    fits = np.ones(len(words.words), dtype=bool)
    for guess, marks in state.rows:
        for place, (letter, mark) in enumerate(zip(guess, marks, strict=True)):
            if mark == HERE:
                fits &= words.array[:, place] == words.letters.index(letter)
    if heeds == "last":
        guess, marks = state.rows[-1]
        fits &= words.codes([words.index[guess]], words.everything)[0] == code_of(marks)
    return np.flatnonzero(fits)


def choose(name: PlayerName, words: WordList, state: WordleState, rng: Random) -> str:
    """The player's next guess, which need not be a word."""
    player = PLAYERS[name]
    if player.heeds == "best":
        return words.words[best_guess(words, state.left)]
    pool = words.everything if rng.random() < player.slip else heeded(words, state, player.heeds)
    word = list(words.words[rng.choice(pool.tolist())])
    if rng.random() < player.typo:
        word[rng.randrange(len(word))] = rng.choice(words.letters)
    return "".join(word)
