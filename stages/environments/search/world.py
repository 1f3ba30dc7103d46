"""The fictional encyclopaedia: two-syllable names, pages of facts, and multi-hop questions about them.

A world is a pure function of (split, number). Names of train, valid and test worlds are disjoint, while every syllable occurs
in all three: the parts of an unseen name are known to a tokenizer, and nothing about a world can be memorised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random
from typing import Any

from stages.records.task import SPLITS, Split
from stages.seeding import stream

_FIRST = """
    Bal Ber Bor Cal Cor Dal Del Dor Fal Fen Fir Gal Gel Gor Hal Hel Hor Jal Jor Kal
    Kel Kor Lor Lun Mal Mel Mir Mor Nal Nel Nor Pel Pom Ral Ros Sel Tal Tor Val Zor
"""
_SECOND = """
    bas ben bis bon dan den din dus gan gar gos gus kan kas ken kin kos kus lan
    las lis los mas mek min mon nak nas nis pas ran ras ris rus san sen sin tan tar vin
"""
FIRST, SECOND = tuple(_FIRST.split()), tuple(_SECOND.split())
KINDS = ("Abbey", "Circle", "Court", "Guild", "Hall", "House", "Order", "School")
RELATIONS = ("ally", "envoy", "founder", "heir", "keeper", "master", "mentor", "patron", "rival", "warden")
_CLASSES: dict[Split, tuple[int, ...]] = {"train": (0, 1, 2, 3, 4), "valid": (5,), "test": (6, 7, 8, 9)}

NAMES_PER_WORLD = 36
PAGELESS_NAMES = 4
SHARED_NAMES = 16
"""Numbers of names in a world, of names without a page, and of names with two pages (one is a distractor)."""


def split_of(name: str) -> Split | None:
    """The split whose worlds may use `name`; None if no world does."""
    if name[:3] not in FIRST or name[3:] not in SECOND:
        return None
    # 7 and 3 are coprime to 10: each first syllable meets every class equally often, and so does each second one.
    residue = (7 * FIRST.index(name[:3]) + 3 * SECOND.index(name[3:])) % 10
    return next(split for split in SPLITS if residue in _CLASSES[split])


@cache
def names_of(split: Split) -> tuple[str, ...]:
    """All names of a split in a fixed order: 800 for train, 160 for valid, 640 for test."""
    return tuple(first + second for first in FIRST for second in SECOND if split_of(first + second) == split)


@dataclass(frozen=True)
class Page:
    """One article. Pages that share a name have disjoint relations, so (name, relation) has one value."""

    name: str
    kind: str
    facts: tuple[tuple[str, str], ...]
    """(relation, name)."""

    @property
    def title(self) -> str:
        return f"{self.name} {self.kind}"

    @property
    def text(self) -> str:
        """As search shows it: "Kelmar Hall: founder Dorvin; rival Selat; heir Pomtar."."""
        return f"{self.title}: " + "; ".join(f"{relation} {value}" for relation, value in self.facts) + "."


@dataclass(frozen=True)
class Hop:
    """One piece of evidence: `page` states that the `relation` of `name` is `value`."""

    page: str
    name: str
    relation: str
    value: str


@dataclass(frozen=True)
class World:
    """An encyclopaedia of about 50 short pages."""

    pages: tuple[Page, ...]

    @cached_property
    def facts(self) -> dict[tuple[str, str], tuple[Page, str]]:
        """(name, relation) -> (page, value)."""
        return {(page.name, relation): (page, value) for page in self.pages for relation, value in page.facts}

    def chain(self, start: str, relations: Sequence[str]) -> list[Hop]:
        """The hops from `start` along `relations`. Raises ValueError for a missing fact."""
        hops, name = [], start
        for relation in relations:
            if (name, relation) not in self.facts:
                raise ValueError(f"its world has no '{relation}' of '{name}'")
            page, value = self.facts[name, relation]
            hops.append(Hop(page.title, name, relation, value))
            name = value
        return hops

    def to_json(self) -> str:
        pages = [{"name": page.name, "kind": page.kind, "facts": [list(fact) for fact in page.facts]} for page in self.pages]
        return "\n".join(["[", ",\n".join(json.dumps(page) for page in pages), "]"]) + "\n"

    @classmethod
    def from_json(cls, text: str) -> World:
        """The inverse of `to_json`. Raises ValueError (json.JSONDecodeError) or KeyError for other text."""
        pages: list[Mapping[str, Any]] = json.loads(text)
        return cls(tuple(Page(page["name"], page["kind"], tuple((r, v) for r, v in page["facts"])) for page in pages))


def make_world(split: Split, number: int) -> World:
    """World `number` of a split; deterministic."""
    rng = stream("search.world", split, number)
    names = rng.sample(names_of(split), NAMES_PER_WORLD)
    pages = []
    for index, name in enumerate(names[: NAMES_PER_WORLD - PAGELESS_NAMES]):
        relations = rng.sample(RELATIONS, len(RELATIONS))
        values = rng.sample([other for other in names if other != name], len(RELATIONS))
        for kind in rng.sample(KINDS, 2 if index < SHARED_NAMES else 1):
            size = rng.choice((3, 3, 4))
            facts = tuple((relations.pop(), values.pop()) for _ in range(size))
            pages.append(Page(name, kind, facts))
    rng.shuffle(pages)
    return World(tuple(pages))


def question(start: str, relations: Sequence[str]) -> str:
    """ "Who is the mentor of the founder of Kelmar?" for start Kelmar and relations (founder, mentor)."""
    return "Who is the " + " of the ".join(reversed(relations)) + f" of {start}?"


def draw_chain(world: World, hops: int, rng: Random) -> list[Hop]:
    """A random chain in which every hop is needed: names and relations are distinct, and no earlier page states the answer."""
    by_name: dict[str, list[tuple[str, str]]] = {}
    for (name, relation), (_, value) in world.facts.items():
        by_name.setdefault(name, []).append((relation, value))
    starts = sorted(by_name)
    while True:
        start = name = rng.choice(starts)
        relations: list[str] = []
        for _ in range(hops):
            if name not in by_name:
                break
            relation, name = rng.choice(by_name[name])
            relations.append(relation)
        if len(relations) == hops and len(set(relations)) == hops:
            chain = world.chain(start, relations)
            stated = {value for hop in chain[:-1] for _, value in by_name[hop.name]}
            if len({start, *(hop.value for hop in chain)}) == hops + 1 and chain[-1].value not in stated:
                return chain
