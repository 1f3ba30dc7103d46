"""The shipped profiles of the factbook domain as books, and questions to them."""

from __future__ import annotations

from pathlib import Path

from stages.environments.factbook.book import Book
from stages.environments.factbook.profiles import read_profiles
from stages.environments.factbook.questions import Question
from stages.records.task import SPLITS

ROOT = Path(__file__).resolve().parents[2]
PROFILES = read_profiles(ROOT / "data/raw/factbook")
BOOKS = {split: Book(PROFILES, split) for split in SPLITS}


def question(kind: str, *subjects: str, facts: tuple[str, ...] = (), lowest: bool = False) -> Question:
    return Question(kind, subjects, facts, lowest)
