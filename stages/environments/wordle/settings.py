"""What can be set for wordle (params.yaml, per_domain.wordle.environment), and what a raw record must hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stages.environments.base_domain import parse_record
from stages.environments.protocol import DomainSettings
from stages.records.task import Split
from stages.runtime.validation import Checked

LETTERS = "bcdfghjklmnprstvw"
"""What made words are made of. Without vowels none of them is a word that a model has read."""
MOST_WORDS = 4096
"""Of a list; an expert looks at all of them in every turn."""
Spelling = Literal["letters", "names"]
PlayerName = Literal["novice", "casual", "steady", "expert"]


class Level(Checked):
    """How large a list is. Every number makes the word harder to find."""

    letters: Annotated[int, Field(ge=2, le=8)]
    """Of a word."""
    alphabet: Annotated[int, Field(ge=2, le=26)]
    """Different letters that made words have."""
    size: Annotated[int, Field(ge=2, le=MOST_WORDS)] | None = None
    """Words in the list; null: every string of the letters, or all English words of that length."""
    source: Literal["made", "english"] = "made"

    @model_validator(mode="after")
    def _fits(self) -> Level:
        if self.source == "english":
            if self.alphabet != 26:
                raise ValueError(f"English words have an alphabet of 26 letters, not {self.alphabet}")
            return self
        if self.alphabet > len(LETTERS):
            raise ValueError(f"made words have at most {len(LETTERS)} different letters, not {self.alphabet}")
        strings = self.alphabet**self.letters
        if (self.size or 0) > strings:
            raise ValueError(f"{self.size} words do not fit: {self.alphabet} letters make {strings} words of {self.letters}")
        if self.size is None and strings > MOST_WORDS:
            raise ValueError(
                f"{self.alphabet} letters make {strings} words of {self.letters}, and lists hold at most {MOST_WORDS}; give size"
            )
        return self

    def bits(self, words: int) -> float:
        """Difficulty of a list: log2 of its words, to three digits."""
        return round(math.log2(words), 3)


class WeightedLevel(Level):
    """A level and its weight in recipes and among the tasks that curation takes."""

    weight: Annotated[float, Field(gt=0.0)] = 1.0


class WordleSettings(DomainSettings):
    """Settings of the environment, and of the recipes it writes (`python -m stages.curation raw wordle`)."""

    of_no_move: ClassVar[tuple[str, ...]] = ("reward", "show")

    max_turns: Annotated[int, Field(ge=1, le=64)] = 6
    """Guesses, illegal ones included."""
    levels: Annotated[tuple[WeightedLevel, ...], Field(min_length=1)] = (
        WeightedLevel(letters=3, alphabet=5),
        WeightedLevel(letters=3, alphabet=6, weight=2.0),
        WeightedLevel(letters=3, alphabet=8),
    )
    """Lists of 125, 216 and 512 words."""
    lists: Literal["own", "shared"] = "own"
    """Made lists: one for each task, so that none can be known by heart, or one for each level."""
    hidden: Literal["fixed", "consistent"] = "fixed"
    """`fixed`: the word stays. `consistent`: each guess is marked for a word drawn among those that fit all that was said, as in
    LMRL-Gym; what a state is worth then depends on nothing hidden."""
    reward: Literal["solved", "lmrl"] = "solved"
    """`solved`: 1 for the word, else 0. `lmrl`: LMRL-Gym's, -1 for every guess that is not the word, illegal ones included, and 0
    for the word; success is a reward term then."""
    show: Literal["marks", "board"] = "board"
    """After a guess: its marks; or also what follows from all marks so far: untried letters, letters to use, places found. Small
    models work with what they were just shown."""
    spelling: Spelling = "letters"
    """How letters are shown and written: b, or by the names of a spelling alphabet, bell. Small models can't work with tokens
    that they have hardly met."""
    show_words: bool = False
    """The prompt holds the whole list; without it, what is legal has to be found out, unless every string is."""
    players: dict[PlayerName, Annotated[float, Field(ge=0.0)]] = Field(
        default={"novice": 2.0, "casual": 3.0, "steady": 3.0, "expert": 1.0}
    )
    """Weights of the players of game records (`python -m stages.curation games wordle`); see `players`."""
    instructions: bool = False
    """Put what to do before the letters; for models that were not trained on this domain."""

    @model_validator(mode="after")
    def _sensible(self) -> WordleSettings:
        if sum(self.players.values()) <= 0:
            raise ValueError("players needs at least one weight above 0, e.g. {novice: 1, steady: 1}")
        return self


class Recipe(Level):
    """One raw record: a level, the seed of its list, and the word."""

    task_id: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")]
    split: Split
    list: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of the list."""
    word: str
    """Hidden with `hidden: fixed`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Of the draws with `hidden: consistent`."""

    @property
    def level(self) -> Level:
        return Level(letters=self.letters, alphabet=self.alphabet, size=self.size, source=self.source)


def parse_recipe(record: Mapping[str, Any]) -> Recipe:
    """A raw record, checked. Raises ValueError with one line per mistake: the key, what is wrong and what was given."""
    return parse_record(Recipe, record, "wordle")
