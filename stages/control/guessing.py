"""A small vectorised word-guessing game, on which value heads are compared offline.

Wordle's rules (stages/environments/wordle/rules.py) with few letters: a guess is answered letter by letter, the reward is 0 for
the hidden word and -1 for any other guess, and a game ends when it is solved or after `guesses` of them. As in LMRL-Gym (Abdulhai
et al., arXiv 2311.18232) the hidden word is not fixed: each guess is answered for one drawn from those that are still consistent,
so that the game is stochastic for the player.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stages.control.settings import Game
from stages.environments.wordle.rules import codes
from stages.seeding import key64, permutation

Choose = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(guesses so far [N, u], answers so far [N, u], which words are consistent [N, W]) -> the next guesses [N]."""


@dataclass(frozen=True)
class Games:
    """N games of at most U guesses; all arrays [N, U]."""

    guess: np.ndarray
    """Index of the word; -1 past the end."""
    answer: np.ndarray
    reward: np.ndarray
    real: np.ndarray
    """Whether the guess was made."""
    last: np.ndarray
    """Whether the game ended with it."""

    @property
    def solved(self) -> np.ndarray:
        """[N]."""
        return (self.real & self.last & (self.reward == 0)).any(1)

    def returns(self, gamma: float) -> np.ndarray:
        """Discounted sum of the rewards from each guess on, [N, U]."""
        found = np.where(self.real, self.reward, 0.0)
        for place in range(found.shape[1] - 2, -1, -1):
            found[:, place] += gamma * np.where(self.real[:, place + 1], found[:, place + 1], 0.0)
        return found


class Guessing:
    """The game of `settings`; its words are drawn by `seed`."""

    def __init__(self, settings: Game, seed: int) -> None:
        self.settings = settings
        every = list(itertools.product(range(settings.alphabet), repeat=settings.letters))
        self.words = sorted(permutation(every, seed, "guessing.words")[: settings.words])
        letters = np.array(self.words)
        self.answers = codes(letters, letters).astype(np.int64)
        """[W, W]: the answer to a guess (row) for a hidden word (column), as a number in base 3."""
        self.solved = 3**settings.letters - 1

    def play(self, count: int, choose: Choose, *key: object) -> Games:
        """`count` games at once; `key` names the random draws of the hidden words."""
        rng = np.random.default_rng(key64(*key, "hidden"))
        shape = (count, self.settings.guesses)
        guess, answer = np.full(shape, -1), np.full(shape, -1)
        reward, real, last = np.zeros(shape), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        consistent = np.ones((count, len(self.words)), dtype=bool)
        going = np.ones(count, dtype=bool)
        for place in range(self.settings.guesses):
            chosen = choose(guess[:, :place], answer[:, :place], consistent)
            hidden = _draw(consistent, rng)
            response = self.answers[chosen, hidden]
            guess[going, place], answer[going, place] = chosen[going], response[going]
            reward[going, place] = np.where(response[going] == self.solved, 0.0, -1.0)
            real[:, place] = going
            consistent[going] &= self.answers[chosen[going]] == response[going, None]
            ends = going & ((response == self.solved) | (place + 1 == self.settings.guesses))
            last[:, place] = ends
            going = going & ~ends
        return Games(guess, answer, reward, real, last)

    def careless(self, noise: float, *key: object) -> Choose:
        """A player that guesses a consistent word, or with probability `noise` any word."""
        rng = np.random.default_rng(key64(*key, "careless"))

        def choose(guess: np.ndarray, answer: np.ndarray, consistent: np.ndarray) -> np.ndarray:
            careful, any_word = _draw(consistent, rng), rng.integers(len(self.words), size=len(consistent))
            return np.where(rng.random(len(consistent)) < noise, any_word, careful)

        return choose


def _draw(allowed: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random one of the words allowed in each row of [N, W]: [N]."""
    return np.where(allowed, rng.random(allowed.shape), -1.0).argmax(1)
