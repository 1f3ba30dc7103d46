"""Briefs: what is asked, how a good one reads, and what a text states. Pure functions on text.

    quality = 4 c - 2 w - e + o + f - p / 4

c, w, e: facts that are asked for and right, wrong, and stated without being asked for or again, each as a share of those asked
for; o: the longest common subsequence of the right facts with those asked for, as a share; f: the share of demands on form that
are met; p: words that belong to no statement, at most 8. At best 6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stages.environments.search.scoring import common_length

Form = Literal["list", "prose"]
BEST = 6.0
PADDING = 8
_LINKS = {"", "has", "and", "is", "of", "the", "with", "its"}
"""Words between statements that are no padding."""


@dataclass(frozen=True)
class Asked:
    """What a task asks for. `facts`: (noun, value), as shown; `wanted`: nouns in the order in which to state them."""

    entity: str
    facts: tuple[tuple[str, str], ...]
    wanted: tuple[str, ...]
    form: Form
    words: int
    """Largest number of words."""

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Asked:
        facts = tuple((noun, value) for noun, value in spec["facts"])
        return cls(spec["entity"], facts, tuple(spec["wanted"]), spec["form"], spec["words"])

    @property
    def values(self) -> dict[str, str]:
        return dict(self.facts)


@dataclass(frozen=True)
class Reading:
    """What a text states: nouns with their right value in order, nouns with another value, and words of no statement."""

    right: tuple[str, ...]
    wrong: tuple[str, ...]
    repeated: int
    padding: int


def write(asked: Asked, form: Form | None = None, nouns: Sequence[str] | None = None) -> str:
    """A brief in a form (default: the one asked for) that states `nouns` (default: those asked for)."""
    values = asked.values
    points = [f"{noun} {values[noun]}" for noun in (asked.wanted if nouns is None else nouns)]
    if (form or asked.form) == "list":
        return f"{asked.entity}: {'; '.join(points)}."
    listed = " and ".join([", ".join(points[:-1]), points[-1]] if points[1:] else points)
    return f"{asked.entity} has {listed}."


def paraphrases(asked: Asked) -> list[str]:
    """Three references that state the same: in the form asked for, in the other, and with verbs."""
    values = asked.values
    other: Form = "prose" if asked.form == "list" else "list"
    verbs = ", ".join(f"its {noun} is {values[noun]}" for noun in asked.wanted)
    return [write(asked), write(asked, other), f"Of {asked.entity}, {verbs}."]


def mistakes(asked: Asked) -> list[str]:
    """What reads like a reference and is wrong, in each of their wordings: another order, exchanged values, a fact less, and one
    that was not asked for; as far as the facts allow."""
    first, *others = asked.wanted
    beside = [noun for noun, _ in asked.facts if noun not in asked.wanted]
    changed = [replace(asked, wanted=(*asked.wanted, noun)) for noun in beside[:1]]
    if others:
        moved = {first: asked.values[others[0]], others[0]: asked.values[first]}
        exchanged = tuple((noun, moved.get(noun, value)) for noun, value in asked.facts)
        orders = [asked.wanted[::-1], asked.wanted[:-1]]
        changed += [replace(asked, wanted=nouns) for nouns in orders] + [replace(asked, facts=exchanged)]
    right = paraphrases(asked)
    return [text for one in changed for text in paraphrases(one) if text not in right]


def words_of(text: str) -> list[str]:
    """Words in lower case, without punctuation around them."""
    return [word for part in text.split() if (word := part.strip(".,;:!?()\"'").lower())]


def read(asked: Asked, text: str) -> Reading:
    """What `text` states of the facts shown. A fact is right if its value follows its noun, with at most "is" or "of" between."""
    values = asked.values
    nouns = "|".join(re.escape(noun) for noun in sorted(values, key=lambda noun: (-len(noun), noun)))
    right, wrong, repeated = [], [], 0
    rest, at = [], 0
    for found in re.finditer(rf"\b(?:{nouns})\b", text, re.IGNORECASE):
        if found.start() < at:
            continue  # inside the statement before
        noun = next(noun for noun in values if noun.lower() == found.group().lower())
        stated = re.compile(rf"(?:\s*:|\s+(?:is|of))?\s+{re.escape(values[noun])}(?!\w|[.,]\d)", re.IGNORECASE).match(
            text, found.end()
        )
        rest.append(text[at : found.start()])
        at = stated.end() if stated else found.end()
        repeated += noun in right or noun in wrong
        (right if stated else wrong).append(noun)
    rest.append(text[at:])
    name = set(words_of(asked.entity))
    padding = [word for part in rest for word in words_of(part) if word not in _LINKS and word not in name]
    return Reading(tuple(dict.fromkeys(right)), tuple(dict.fromkeys(wrong)), repeated, len(padding))


def demands(asked: Asked, text: str) -> dict[str, bool]:
    """The demands on form, which the prompt states and the reward pays: the entity first, the form, the number of words."""
    opening, listed = text.strip().lower(), asked.form == "list"
    name = asked.entity.lower()
    marks = opening.startswith(f"{name}:") if listed else opening.startswith(f"{name} has ") and ";" not in opening
    return {"entity": opening.startswith(name), "form": marks, "words": 0 < len(text.split()) <= asked.words}


def checklist(asked: Asked, text: str) -> dict[str, bool]:
    """What a perfect brief meets, in words, and whether `text` does: each demand on form, each fact, their order, and no more."""
    found, met = read(asked, text), demands(asked, text)
    right = [noun for noun in found.right if noun in asked.wanted]
    form = f'is a list that begins with "{asked.entity}:"' if asked.form == "list" else f'is prose: "{asked.entity} has ..."'
    extra = len(found.right) > len(right) or found.wrong or found.repeated or found.padding
    return {
        f"begins with {asked.entity}": met["entity"],
        form: met["form"],
        f"has at most {asked.words} words": met["words"],
        **{f"says that the {noun} is {asked.values[noun]}": noun in found.right for noun in asked.wanted},
        f"keeps the order {', '.join(asked.wanted)}": right == [noun for noun in asked.wanted if noun in right] and bool(right),
        "says nothing wrong, nothing twice and nothing else": not extra and bool(right),
    }


def quality(asked: Asked, text: str) -> float:
    """See the module. In at most BEST."""
    found, count = read(asked, text), len(asked.wanted)
    right = [noun for noun in found.right if noun in asked.wanted]
    extra = len(found.right) - len(right) + found.repeated
    met = list(demands(asked, text).values())
    return (
        (4 * len(right) - 2 * len(found.wrong) - extra + common_length(right, asked.wanted)) / count
        + sum(met) / len(met)
        - min(found.padding, PADDING) / 4
    )


def perfect(asked: Asked, text: str) -> bool:
    """Whether nothing could be better: the quality is BEST."""
    return quality(asked, text) >= BEST - 1e-9
