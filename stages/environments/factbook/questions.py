"""Kinds of questions: each derives its answer from the fields, page by page, as an agent has to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from stages.environments.factbook.book import Book, comparison, extreme_of
from stages.environments.factbook.facts import CONVERSIONS, FACTS, KNOWN, NUMBERS, Fact, also_right, value, written
from stages.seeding import key64

_WITH_ARTICLE = re.compile(
    r"(?:United|Republic|Federated|Democratic|Gaza|West) |"
    r".*(?: Islands| Republic|Netherlands|Philippines|Maldives|Holy See|Middle East|Caribbean)$"
)


@dataclass(frozen=True)
class Hop:
    """A page that has to be read, and a query that finds it."""

    page: str
    query: str


@dataclass(frozen=True)
class Question:
    """What is asked. `subjects`: countries, or a part of the world; `facts`: names in FACTS; `lowest`: the smallest instead of
    the largest, in kinds that compare."""

    kind: str
    subjects: tuple[str, ...]
    facts: tuple[str, ...]
    lowest: bool = False


@dataclass
class Reading:
    """The pages that answer a question, in order, and the countries that they are about."""

    book: Book
    hops: list[Hop] = field(default_factory=list)
    countries: list[str] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    """Texts that are as right as the fact read last."""

    def _read(self, name: str, page: str) -> None:
        self.hops.append(Hop(f"{name}: {page}", f"{name} {page}"))
        self.countries.append(name)

    def value(self, name: str, fact: Fact) -> str:
        """The fact as the page has it. Raises ValueError if there is none, or it is 0."""
        text = value(self.book.profile(name), fact)
        if fact.unit and self.book.number(name, fact) == 0:
            raise ValueError(f"{name}: {fact.noun} is 0")
        self._read(name, fact.page)
        self.also = also_right(self.book.profile(name), fact)
        return text

    def neighbours(self, name: str, but: str = "", count: int = 1) -> list[str]:
        """The countries with the `count` longest borders with `name`, without `but`."""
        found = self.book.neighbours(name, but)[:count]
        for one in found:
            self.book.profile(one)
        if len(found) < count:
            raise ValueError(f"{name} borders only {', '.join(found)}")
        self._read(name, "Land boundaries")
        return found

    def extreme(self, area: str, fact: Fact, lowest: bool) -> str:
        found = self.book.extreme(area, fact, lowest=lowest)
        title = comparison(area, fact)
        self.hops.append(Hop(title, title.replace(":", "")))
        self.countries.append(found)
        return found

    def compared(self, names: Sequence[str], fact: Fact, lowest: bool) -> str:
        for name in names:
            self.value(name, fact)
        return extreme_of({name: self.book.number(name, fact) for name in names}, lowest=lowest)


def _fact(reading: Reading, asked: Question) -> str:
    return reading.value(asked.subjects[0], FACTS[asked.facts[0]])


def _conversion(reading: Reading, asked: Question) -> str:
    fact = FACTS[asked.facts[0]]
    reading.value(asked.subjects[0], fact)
    return written(reading.book.number(asked.subjects[0], fact) * CONVERSIONS[fact.unit][1])


def _neighbour(reading: Reading, asked: Question) -> str:
    return reading.neighbours(asked.subjects[0])[0]


def _superlative(reading: Reading, asked: Question) -> str:
    return reading.extreme(asked.subjects[0], FACTS[asked.facts[0]], asked.lowest)


def _comparison(reading: Reading, asked: Question) -> str:
    return reading.compared(asked.subjects, FACTS[asked.facts[0]], asked.lowest)


def _neighbour_fact(reading: Reading, asked: Question) -> str:
    return reading.value(_neighbour(reading, asked), FACTS[asked.facts[0]])


def _second_neighbour(reading: Reading, asked: Question) -> str:
    start = asked.subjects[0]
    return reading.neighbours(_neighbour(reading, asked), but=start)[0]


def _superlative_fact(reading: Reading, asked: Question) -> str:
    found = reading.extreme(asked.subjects[0], FACTS[asked.facts[0]], asked.lowest)
    return reading.value(found, FACTS[asked.facts[1]])


def _second_neighbour_fact(reading: Reading, asked: Question) -> str:
    return reading.value(_second_neighbour(reading, asked), FACTS[asked.facts[0]])


def _neighbours_compared(reading: Reading, asked: Question) -> str:
    return reading.compared(reading.neighbours(asked.subjects[0], count=2), FACTS[asked.facts[0]], asked.lowest)


def _superlative_neighbour_fact(reading: Reading, asked: Question) -> str:
    found = reading.extreme(asked.subjects[0], FACTS[asked.facts[0]], asked.lowest)
    return reading.value(reading.neighbours(found)[0], FACTS[asked.facts[1]])


Pool = Literal["number", "convertible", "unknown", "any"]
POOLS: Mapping[Pool, list[str]] = {
    "number": sorted(NUMBERS),
    "convertible": sorted(name for name, fact in NUMBERS.items() if fact.unit in CONVERSIONS),
    "unknown": sorted(FACTS.keys() - KNOWN.keys()),
    "any": sorted(FACTS),
}


@dataclass(frozen=True)
class Kind:
    """`solve` reads the pages and returns the answer. `forms` use {a} and {b} for subjects, {of} for the fact asked for, {by} and
    {noun} for the one compared, and {more} and {most} for its comparative and superlative."""

    hops: int
    solve: Callable[[Reading, Question], str]
    facts: tuple[Pool, ...]
    forms: tuple[str, str, str]
    countries: int = 1
    """Subjects; 0: a part of the world."""

    def draw(self, name: str, book: Book, rng: Random) -> Question:
        """A question, which may have no answer."""
        subjects = rng.sample(sorted(book.by_name), self.countries) if self.countries else [rng.choice(sorted(book.areas))]
        facts = tuple(rng.choice(POOLS[pool]) for pool in self.facts)
        return Question(name, tuple(subjects), facts, "{mo" in self.forms[0] and rng.random() < 0.5)


_NEIGHBOUR = "the country with which {a} shares its longest land border"
KINDS = {
    "fact": Kind(1, _fact, ("unknown",), ("What is the {of} of {a}?", "Look up {a}: what is the {of}?", "Give the {of} of {a}.")),
    "conversion": Kind(
        1,
        _conversion,
        ("convertible",),
        ("What is the {of} of {a}?", "Look up {a} and convert: what is the {of}?", "Give the {of} of {a}."),
    ),
    "neighbour": Kind(
        1,
        _neighbour,
        (),
        (
            "With which country does {a} share its longest land border?",
            "Name " + _NEIGHBOUR + ".",
            "Which country has the longest land border with {a}?",
        ),
    ),
    "superlative": Kind(
        1,
        _superlative,
        ("number",),
        (
            "Which country of {a} has the {most} {noun}?",
            "In {a}, where is the {noun} {most}?",
            "Name the country of {a} with the {most} {noun}.",
        ),
        countries=0,
    ),
    "comparison": Kind(
        2,
        _comparison,
        ("number",),
        (
            "Which has the {more} {noun}, {a} or {b}?",
            "Of {a} and {b}, which has the {more} {noun}?",
            "Is the {noun} {more} in {a} or in {b}?",
        ),
        countries=2,
    ),
    "neighbour_fact": Kind(
        2,
        _neighbour_fact,
        ("any",),
        (
            "What is the {of} of " + _NEIGHBOUR + "?",
            "Find " + _NEIGHBOUR + ": what is its {of}?",
            "{a} shares its longest land border with one country. Give the {of} of that country.",
        ),
    ),
    "second_neighbour": Kind(
        2,
        _second_neighbour,
        (),
        (
            "Apart from {a}, with which country does " + _NEIGHBOUR + " share its own longest land border?",
            "Find " + _NEIGHBOUR + ". Leaving out {a}, which country has the longest land border with it?",
            "Which country other than {a} has the longest land border with " + _NEIGHBOUR + "?",
        ),
    ),
    "superlative_fact": Kind(
        2,
        _superlative_fact,
        ("number", "any"),
        (
            "What is the {of} of the country of {a} with the {most} {noun}?",
            "Find the country of {a} with the {most} {noun}: what is its {of}?",
            "One country of {a} has the {most} {noun}. Give the {of} of that country.",
        ),
        countries=0,
    ),
    "second_neighbour_fact": Kind(
        3,
        _second_neighbour_fact,
        ("any",),
        (
            "Leaving out {a}, which country has the longest land border with " + _NEIGHBOUR + "? What is its {of}?",
            "Find " + _NEIGHBOUR + ", then the country other than {a} with the longest land border with it: what is its {of}?",
            "Give the {of} of the country other than {a} that has the longest land border with " + _NEIGHBOUR + ".",
        ),
    ),
    "neighbours_compared": Kind(
        3,
        _neighbours_compared,
        ("number",),
        (
            "{a} has its two longest land borders with two countries. Which of them has the {more} {noun}?",
            "Of the two countries with the longest land borders with {a}, which has the {more} {noun}?",
            "Take the two countries with which {a} shares its longest land borders: where is the {noun} {more}?",
        ),
    ),
    "superlative_neighbour_fact": Kind(
        3,
        _superlative_neighbour_fact,
        ("number", "any"),
        (
            "What is the {of} of the country that has the longest land border with the country of {a} with the {most} {noun}?",
            "Find the country of {a} with the {most} {noun}, then the country with its longest land border: what is its {of}?",
            "One country of {a} has the {most} {noun}. Give the {of} of the country that it has its longest land border with.",
        ),
        countries=0,
    ),
}


def named(subject: str) -> str:
    """A name within a sentence: "the Netherlands"."""
    return f"the {subject}" if _WITH_ARTICLE.match(subject) else subject.replace("The ", "the ", 1)


def prompt(asked: Question) -> str:
    """The question in words. The same question always has the same wording, one of several."""
    kind = KINDS[asked.kind]
    form = key64("factbook.form", asked.kind, *asked.subjects, *asked.facts, asked.lowest) % len(kind.forms)
    facts = [FACTS[name] for name in asked.facts]
    words = {key: named(subject) for key, subject in zip("ab", asked.subjects, strict=False)}
    if facts:
        of, by = facts[-1], facts[0]
        words["of"] = f"{of.noun} in {CONVERSIONS[of.unit][0]}" if asked.kind == "conversion" else of.asked
        words |= {"noun": by.noun, "more": by.sizes[asked.lowest], "most": by.sizes[2 + asked.lowest]}
    text = kind.forms[form].format(**words)
    return text[0].upper() + text[1:]


def solve(asked: Question, book: Book) -> tuple[str, Reading]:
    """The answer, and the pages that it was read from. Raises ValueError for a question without one answer in the book."""
    reading = Reading(book)
    answer = KINDS[asked.kind].solve(reading, asked)
    if len({hop.page for hop in reading.hops}) < len(reading.hops):
        raise ValueError("one page answers more than one hop")
    return answer, reading
