"""Prompt templates of roles: text files in data/raw/prompts, where DVC notices an edit. Light to import."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = "data/raw/prompts"


class Acted(Protocol):
    """A turn: what was done, and what came of it."""

    @property
    def action(self) -> str: ...
    @property
    def observation(self) -> str: ...


def transcript(turns: Iterable[Acted]) -> str:
    """The turns as the templates show them: `> action`, and the observation below it."""
    return "\n".join(f"> {turn.action}\n{turn.observation}".rstrip() for turn in turns)


@dataclass(frozen=True)
class Prompt:
    """A template; `{name}` in its text is a field, `{{` a brace."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Of the text, for records of what was asked."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def fields(self) -> set[str]:
        return {field for _, field, _, _ in string.Formatter().parse(self.text) if field is not None}

    def fill(self, **values: object) -> str:
        """The text with its fields, without white space at its end. Raises KeyError for a field without a value."""
        return self.text.format(**values).rstrip()


@cache
def load_prompt(name: str) -> Prompt:
    """The template in data/raw/prompts/<name>. Raises ValueError if there is none."""
    path = REPOSITORY / FOLDER / name
    if Path(name).name != name or path.suffix != ".txt" or not path.is_file():
        known = ", ".join(sorted(file.name for file in (REPOSITORY / FOLDER).glob("*.txt")))
        raise ValueError(f"is {name}, which is no text file in {FOLDER} (there: {known}); add the file, or name another")
    return Prompt(name, path.read_text(encoding="utf-8"))


def check_prompt(name: str, needed: Collection[str], known: Collection[str]) -> str:
    """`name`, if the template exists, has all `needed` fields and no other than `known`; for validators. Raises ValueError."""
    try:
        fields = load_prompt(name).fields
    except ValueError as error:
        if str(error).startswith("is "):
            raise
        raise ValueError(f"is {name}, whose braces do not pair up ({error}); write {{{{ for a brace") from error
    if missing := sorted(set(needed) - fields):
        raise ValueError(f"is {name}, which lacks {{{missing[0]}}}; add it to {FOLDER}/{name}")
    if unknown := sorted(fields - set(known) - set(needed)):
        raise ValueError(f"is {name}, whose field {{{unknown[0]}}} has no value; remove it, or write {{{{ for a brace")
    return name
