"""Exact values of wordle: by hand, against brute force, and for both kinds of hidden word."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from wordle_games import game, hand_task, play

from stages.environments.wordle import WordleDomain, WordleEnvironment, WordleSettings
from stages.environments.wordle.exact import ExactValues, consistent
from stages.environments.wordle.players import best_guess
from stages.environments.wordle.words import WordList, every_word
from stages.records.task import Task


def test_fixed_and_consistent_words_have_equal_value() -> None:
    """Contract: with uniform fixed words and with consistent ones, a policy's success is the exact value."""
    policy_words, settings = every_word("bdf", 3), {"max_turns": 3}
    exact = ExactValues(policy_words, WordleSettings(**settings), lambda known, turn: {policy_words.words[known[0]]: 1.0})

    def success(environment: WordleEnvironment, task: Task) -> float:
        environment.reset(task)
        while not environment.state.over:
            environment.step(environment.words.words[environment.state.left[0]])
        return float(environment.state.terminated)

    fixed = [success(game(**settings), hand_task(word, "bdf")) for word in policy_words.words]
    assert np.mean(fixed) == pytest.approx(exact.value(exact.start))
    drawn = [success(game(hidden="consistent", **settings), hand_task("bbb", "bdf", seed)) for seed in range(800)]
    assert np.mean(drawn) == pytest.approx(exact.value(exact.start), abs=4 * np.std(drawn) / np.sqrt(len(drawn)))


def test_exact_values_by_hand() -> None:
    """Two words: the first guess is right half of the time. Three words that every guess separates: one in three."""
    two = WordList("bd", ("bb", "dd"))
    for turns, solved in ((1, 0.5), (2, 1.0)):
        assert ExactValues(two, WordleSettings(max_turns=turns)).value((0, 1)) == solved
    lmrl = WordleSettings(max_turns=6, reward="lmrl")
    assert ExactValues(two, lmrl).value((0, 1)) == -0.5
    assert ExactValues(two, lmrl).value((1,)) == 0.0
    three = ExactValues(WordList("bd", ("bb", "bd", "db")), lmrl, gamma=0.5)
    assert three.value(three.start) == pytest.approx(-2 / 3)
    assert three.q(three.start, "x x") == pytest.approx(-1 - 0.5 * 2 / 3)
    steps = three.episode(["b d", "b b"], ["bb", "bb"])
    assert [(step.known, step.turn) for step in steps] == [((0, 1, 2), 0), ((0,), 1)]
    assert [step.advantage for step in steps] == pytest.approx([0.0, 0.0])


def some_policy(words: WordList):
    """Depends on knowledge and turn, also guesses impossible words, and is partly illegal."""

    def policy(known: tuple[int, ...], turn: int) -> dict[str, float]:
        rng = Random(f"{known} {turn}")
        guesses = rng.sample(words.words, 3)
        weights = [rng.random() for _ in range(4)]
        return {guess: weight / sum(weights) for guess, weight in zip(guesses, weights, strict=False)}

    return policy


def brute_force(environment: WordleEnvironment, exact: ExactValues, turn: int) -> float:
    """The expected return of the policy in the real environment, by playing every guess to the end, illegal ones included."""
    if environment.state.over:
        return 0.0
    now, total = environment.snapshot(), 0.0
    known = tuple(now.left.tolist())
    chances = {environment.words.words[number]: chance for number, chance in exact.probabilities(known, turn).items()}
    chances["illegal"] = 1.0 - sum(chances.values())
    for guess, chance in chances.items():
        environment.restore(now)
        reward = environment.step(guess).reward
        total += chance * (reward + exact.gamma * brute_force(environment, exact, turn + 1))
    environment.restore(now)
    return total


@pytest.mark.parametrize(("reward", "gamma"), [("solved", 1.0), ("lmrl", 0.9)])
def test_exact_values_equal_brute_force(reward: str, gamma: float) -> None:
    """Contract: dynamic programming equals the mean over hidden words of enumerating every game."""
    settings = WordleSettings(max_turns=3, reward=reward)
    words = every_word("bdf", 2)
    exact = ExactValues(words, settings, some_policy(words), gamma)
    environment = WordleDomain(settings).make(Path())

    def mean(guesses: list[str]) -> dict[tuple[int, ...], float]:
        """Knowledge after `guesses` -> the mean value over the words that lead to it."""
        found: dict[tuple[int, ...], list[float]] = {}
        for word in words.words:
            steps = play(environment, hand_task(word, "bdf"), guesses)
            if not steps or not steps[-1].done:
                known = tuple(environment.state.left.tolist())
                found.setdefault(known, []).append(brute_force(environment, exact, len(guesses)))
        return {known: sum(values) / len(values) for known, values in found.items()}

    for guesses in ([], ["b d"], ["f f"], ["x", "d d"]):
        for known, value in mean(guesses).items():
            assert exact.value(known, len(guesses)) == pytest.approx(value, abs=1e-12)


def test_optimal_policy_is_best_and_its_advantages_are_not_positive() -> None:
    words = every_word("bdf", 2)
    settings = WordleSettings(max_turns=4, reward="lmrl")
    best = ExactValues(words, settings)
    for policy in (consistent(words), some_policy(words)):
        assert ExactValues(words, settings, policy).value(best.start) < best.value(best.start)
    for known in ((0, 1, 2, 3), best.start):
        advantages = [best.q(known, word) - best.value(known) for word in words.words]
        assert max(advantages) == pytest.approx(0.0, abs=1e-12)
    expert = ExactValues(words, settings, lambda known, turn: {words.words[best_guess(words, np.array(known))]: 1.0})
    assert expert.value(best.start) == pytest.approx(best.value(best.start), abs=0.05)


def test_invalid_policies_and_episodes_are_rejected() -> None:
    words, settings = every_word("bd", 2), WordleSettings(max_turns=2)
    for bad in ({"bb": 1.5}, {"bb": -0.1}, {"xx": 0.5}):
        with pytest.raises(ValueError, match="for legal words, at least 0 and add up to at most 1"):
            ExactValues(words, settings, lambda known, turn, bad=bad: bad).value((0, 1, 2, 3))
    exact = ExactValues(words, settings)
    with pytest.raises(ValueError, match="is over after 1 of 2 guesses"):
        exact.episode(["b b", "d d"], ["bb", "bb"])
    with pytest.raises(ValueError, match="'dd' contradicts the marks before guess 1"):
        exact.episode(["b b", "b d"], ["bd", "dd"])
