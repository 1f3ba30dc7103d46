"""Exact state values, action values and advantages of wordle by dynamic programming, for any policy.

A state is the set K of words consistent with all marks so far, all equally likely (drawing the hidden word uniformly once or anew
from K at each guess gives the same probabilities of marks). With n_m of |K| words giving the marks m to guess g,

    Q_t(K, g) = sum_m n_m / |K| (r + gamma V_{t+1}(K_m)),   V_t(K) = sum_g pi(g | K, t) Q_t(K, g),

V = 0 once the word is found or t reaches the limit of guesses (backward induction; Puterman, Markov Decision Processes, 1994,
section 4.5). Values are averages over all tasks of a list, not those of one task with its given word or draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stages.environments.wordle.environment import step_reward
from stages.environments.wordle.rules import HERE, code_of, marks_of
from stages.environments.wordle.settings import WordleSettings
from stages.environments.wordle.words import WordList, read

Known = tuple[int, ...]
"""Numbers of the possible words, ascending."""
Policy = Callable[[Known, int], Mapping[str, float]]
"""(possible words, guesses made) -> probability of each legal guess, letters apart or joined. If their sum is below 1, the rest
is the probability of an invalid guess, which uses a turn."""
_TOLERANCE = 1e-6


def consistent(words: WordList) -> Policy:
    """Every possible word with the same probability."""
    return lambda known, turn: {words.words[number]: 1.0 / len(known) for number in known}


@dataclass(frozen=True)
class GuessValue:
    """The exact values of one guess of an episode under a policy."""

    known: Known
    turn: int
    value: float
    """V_t(K) before the guess."""
    q: float
    """Q_t(K, g) of the guess."""
    advantage: float


class ExactValues:
    """Values of a list under `policy`, or under the optimal policy if None, with the guesses and rewards of `settings`.

    Computed on demand. The optimal policy reaches most states: 64 words of three letters take seconds, and time grows faster than
    the cube of the words. Raises ValueError for a policy with negative probabilities, a sum above 1 or words that are not legal.
    """

    def __init__(self, words: WordList, settings: WordleSettings, policy: Policy | None = None, gamma: float = 1.0) -> None:
        self.words, self.settings, self.policy, self.gamma = words, settings, policy, gamma
        self._codes = words.codes(words.everything, words.everything)
        self._solved = code_of([HERE] * words.array.shape[1])
        self._values: dict[tuple[Known, int], float] = {}

    @property
    def start(self) -> Known:
        return tuple(range(len(self.words.words)))

    def answers(self, known: Known, guess: int) -> list[tuple[int, Known]]:
        """Each code that guess number `guess` may get, with the words that are then possible."""
        row = self._codes[guess, list(known)]
        return [(int(code), tuple(np.asarray(known)[row == code].tolist())) for code in np.unique(row)]

    def value(self, known: Known, turn: int = 0) -> float:
        """V_t(K)."""
        if turn >= self.settings.max_turns:
            return 0.0
        if (known, turn) not in self._values:
            self._values[known, turn] = self._backup(known, turn)
        return self._values[known, turn]

    def _backup(self, known: Known, turn: int) -> float:
        if self.policy is None:
            return max(self._worth(known, guess, turn) for guess in range(len(self.words.words)))
        chances = self.probabilities(known, turn)
        illegal = 1.0 - sum(chances.values())
        worth = sum(chance * self._worth(known, guess, turn) for guess, chance in chances.items() if chance > 0.0)
        return worth + illegal * self._refused(known, turn) if illegal > _TOLERANCE else worth

    def probabilities(self, known: Known, turn: int) -> dict[int, float]:
        """The policy's probabilities by word number, checked; the optimal policy is uniform over the best guesses."""
        if self.policy is None:
            qs = [self._worth(known, guess, turn) for guess in range(len(self.words.words))]
            best = [guess for guess, worth in enumerate(qs) if worth >= max(qs) - 1e-9]
            return dict.fromkeys(best, 1.0 / len(best))
        given = {read(guess, "letters"): float(chance) for guess, chance in self.policy(known, turn).items()}
        unknown = sorted(set(given) - set(self.words.index))
        if unknown or min(given.values(), default=0.0) < 0.0 or sum(given.values()) > 1.0 + _TOLERANCE:
            raise ValueError(
                f"the policy's probabilities at guess {turn} must be for legal words, at least 0 and add up to at most 1; "
                f"got {given}"
            )
        return {self.words.index[word]: chance for word, chance in given.items()}

    def q(self, known: Known, guess: str, turn: int = 0) -> float:
        """Q_t(K, g) of any guess, invalid ones included."""
        number = self.words.index.get(read(guess, "letters"))
        return self._refused(known, turn) if number is None else self._worth(known, number, turn)

    def _refused(self, known: Known, turn: int) -> float:
        return step_reward(self.settings.reward, False) + self.gamma * self.value(known, turn + 1)

    def _worth(self, known: Known, guess: int, turn: int) -> float:
        total = 0.0
        for code, after in self.answers(known, guess):
            if code == self._solved:
                total += step_reward(self.settings.reward, True)
            else:
                later = step_reward(self.settings.reward, False) + self.gamma * self.value(after, turn + 1)
                total += len(after) * later
        return total / len(known)

    def episode(self, guesses: Sequence[str], words: Sequence[str]) -> list[GuessValue]:
        """The exact values along an episode of `guesses`, each marked for the word at its index (any word for an invalid guess).

        Raises ValueError for guesses after the episode's end and for words that contradict earlier marks.
        """
        known, steps, over = self.start, [], False
        for turn, (guess, word) in enumerate(zip(guesses, words, strict=True)):
            if over or turn >= self.settings.max_turns:
                raise ValueError(f"the episode is over after {turn} of {len(guesses)} guesses")
            value, q = self.value(known, turn), self.q(known, guess, turn)
            steps.append(GuessValue(known, turn, value, q, q - value))
            if read(guess, "letters") in self.words.index:
                answers = dict(self.answers(known, self.words.index[read(guess, "letters")]))
                code = code_of(marks_of(read(guess, "letters"), word))
                if code not in answers:
                    raise ValueError(f"the word '{word}' contradicts the marks before guess {turn}")
                known, over = answers[code], code == self._solved
        return steps
