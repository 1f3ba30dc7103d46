"""Hand-made wordle games."""

from __future__ import annotations

from pathlib import Path

from stages.environments.wordle import WordleDomain, WordleEnvironment, WordleSettings
from stages.records.task import Task


def hand_task(word: str = "dbf", letters: str = "bdfg", seed: int = 0) -> Task:
    return Task("hand", "wordle", "train", seed, "", {"letters": letters, "list": None, "word": word}, 6.0)


def game(**settings) -> WordleEnvironment:
    return WordleDomain(WordleSettings(**settings)).make(Path())


def play(environment: WordleEnvironment, task: Task, guesses: list[str]) -> list:
    environment.reset(task)
    return [environment.step(guess) for guess in guesses]
