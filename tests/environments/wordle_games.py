"""Hand-made wordle games, and marks in another way."""

from __future__ import annotations

from pathlib import Path

from stages.environments.wordle import WordleDomain, WordleEnvironment, WordleSettings
from stages.environments.wordle.rules import HERE, IN, NOT
from stages.records.task import Task


def hand_task(word: str = "dbf", letters: str = "bdfg", seed: int = 0) -> Task:
    return Task("hand", "wordle", "train", seed, "", {"letters": letters, "list": None, "word": word}, 6.0)


def game(**settings) -> WordleEnvironment:
    return WordleDomain(WordleSettings(**settings)).make(Path())


def play(environment: WordleEnvironment, task: Task, guesses: list[str]) -> list:
    environment.reset(task)
    return [environment.step(guess) for guess in guesses]


def reference(guess: str, word: str) -> list[str]:
    """Marks by crossing out letters of the word: first those in their place, then the others from left to right."""
    remaining: list[str | None] = list(word)
    marks = [NOT] * len(guess)
    for place, letter in enumerate(guess):
        if remaining[place] == letter:
            remaining[place], marks[place] = None, HERE
    for place, letter in enumerate(guess):
        if marks[place] == NOT and letter in remaining:
            remaining[remaining.index(letter)], marks[place] = None, IN
    return marks
