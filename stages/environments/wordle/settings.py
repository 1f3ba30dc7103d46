"""Settings of the wordle domain (per_domain.wordle.environment in params.yaml), and its raw records."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stages.environments.base_domain import some_weight
from stages.environments.protocol import DomainSettings
from stages.records.task import Split
from stages.runtime.validation import Checked

LETTERS = "bcdfghjklmnprstvw"
"""Letters of generated words. Without vowels, none is a word that a model has seen."""
MOST_WORDS = 4096
"""Largest list; the expert examines all words in every turn."""
Spelling = Literal["letters", "names"]
PlayerName = Literal["novice", "casual", "steady", "expert"]


class Level(Checked):
    """The size of a list. Larger numbers make the word harder to find."""

    letters: Annotated[int, Field(ge=2, le=8)]
    """Length of a word."""
    alphabet: Annotated[int, Field(ge=2, le=26)]
    """Different letters in generated words; 26 for English ones."""
    size: Annotated[int, Field(ge=2, le=MOST_WORDS)] | None = None
    """Words in the list; null: every string of the letters, or every English word of that length."""
    source: Literal["made", "english"] = "made"

    @model_validator(mode="after")
    def _fits(self) -> Level:
        if self.source == "english":
            if self.alphabet != 26:
                raise ValueError(f"English words need alphabet: 26, not {self.alphabet}")
            return self
        if self.alphabet > len(LETTERS):
            raise ValueError(f"generated words have at most {len(LETTERS)} different letters, not {self.alphabet}")
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
    """A level and its weight in recipes and in curation."""

    weight: Annotated[float, Field(gt=0.0)] = 1.0


class WordleSettings(DomainSettings):
    replay_invariant: ClassVar[tuple[str, ...]] = ("reward", "show")

    max_turns: Annotated[int, Field(ge=1, le=64)] = 6
    """Guesses, invalid ones included."""
    levels: Annotated[tuple[WeightedLevel, ...], Field(min_length=1)] = (
        WeightedLevel(letters=3, alphabet=5),
        WeightedLevel(letters=3, alphabet=6, weight=2.0),
        WeightedLevel(letters=3, alphabet=8),
    )
    """These have lists of 125, 216 and 512 words."""
    lists: Literal["own", "shared"] = "own"
    """Generated lists: one per task, so that none can be memorised, or one per level."""
    hidden: Literal["fixed", "consistent"] = "fixed"
    """`fixed`: one word per episode. `consistent`: as in LMRL-Gym, each guess is marked for a word redrawn among those consistent
    with all marks so far, so that a state's value depends on nothing hidden."""
    reward: Literal["solved", "lmrl"] = "solved"
    """`solved`: 1 for the word, else 0. `lmrl`: as in LMRL-Gym, 0 for the word and -1 for every other guess, invalid ones
    included; success is then a reward term."""
    show: Literal["marks", "board"] = "board"
    """Shown after a guess: its marks alone, or also a summary of all marks: untried letters, letters to use, places found; small
    models need it."""
    spelling: Spelling = "letters"
    """Letters as such (b) or as names of a spelling alphabet (bell), which a small model has seen more often."""
    show_words: bool = False
    """List all legal words in the prompt."""
    players: dict[PlayerName, Annotated[float, Field(ge=0.0)]] = Field(
        default={"novice": 2.0, "casual": 3.0, "steady": 3.0, "expert": 1.0}
    )
    """Weights of the players of game records (`python -m stages.curation games wordle`)."""
    instructions: bool = False
    """Begin the prompt with the rules; for models that were not trained on this domain."""

    _some_weight = field_validator("players")(some_weight("players", "{novice: 1, steady: 1}"))


class Recipe(Level):
    """A raw record: a level, the seed of its list, and the word."""

    task_id: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")]
    split: Split
    list: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of the list."""
    word: str
    """The hidden word with `hidden: fixed`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of the draws with `hidden: consistent`."""

    @property
    def level(self) -> Level:
        return Level(letters=self.letters, alphabet=self.alphabet, size=self.size, source=self.source)
