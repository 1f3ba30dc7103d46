"""Who plays: the expert of demonstrations, and players of several strengths whose games are records to learn from off-policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal

import numpy as np

from stages.environments.wordle.rules import HERE, code_of
from stages.environments.wordle.settings import PlayerName
from stages.environments.wordle.words import WordList, spaced
from stages.seeding import stream

if TYPE_CHECKING:
    from stages.environments.wordle.environment import WordleState

WEIGHED = 256
"""Guesses that are weighed against each other: all of a list up to this, else so many of the words still possible."""


def expected_left(words: WordList, guesses: Sequence[int] | np.ndarray, left: np.ndarray) -> np.ndarray:
    """[guesses] words that remain on average after each guess, all of `left` being as likely: sum over marks of n^2 / |left|, the
    guess itself not counting where it is the word."""
    table = words.codes(guesses, left)
    table.sort(axis=1)
    starts = np.concatenate([np.ones((len(table), 1), dtype=bool), table[:, 1:] != table[:, :-1]], axis=1)
    squares = np.array([np.square(np.diff(np.append(np.flatnonzero(row), len(left)))).sum() for row in starts])
    return (squares - np.isin(guesses, left)) / len(left)


def best_guess(words: WordList, left: np.ndarray) -> int:
    """The legal word that leaves the fewest on average; of equals a possible one, then the first in the list's order.

    Of long lists only `WEIGHED` words are weighed, drawn among the possible ones by what is known.
    """
    if len(left) <= 2:
        return int(left[0])
    guesses = words.everything
    if len(guesses) > WEIGHED:
        guesses = left
        if len(left) > WEIGHED:
            guesses = np.sort(stream("wordle.weighed", len(words.words), len(left)).sample(left.tolist(), WEIGHED))
            guesses = np.unique(np.append(guesses, _first_fresh(words, left)))
    expected = np.round(expected_left(words, guesses, left), 9)
    order = np.lexsort((guesses, ~np.isin(guesses, left), expected))
    return int(guesses[order[0]])


def _first_fresh(words: WordList, left: np.ndarray) -> int:
    """The first possible word without repeated letters, or the first one where there is none."""
    spread = [len(set(words.words[number])) for number in left]
    return int(left[int(np.argmax(spread))])


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
    """The player's next action."""
    player = PLAYERS[name]
    if player.heeds == "best":
        return spaced(words.words[best_guess(words, state.left)])
    pool = words.everything if rng.random() < player.slip else heeded(words, state, player.heeds)
    word = list(words.words[rng.choice(pool.tolist())])
    if rng.random() < player.typo:
        word[rng.randrange(len(word))] = rng.choice(words.letters)
    return spaced("".join(word))
