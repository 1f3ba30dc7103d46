"""Catalogues of items that differ in kind, attributes, options and price, and customers' goals.

A catalogue is a pure function of (split, number). Item names are the encyclopaedia's names for the split, so those of train,
valid and test shops are disjoint. Kinds, attributes and options are common words that all shops share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import Any

from stages.environments.search.world import names_of
from stages.records.task import Split
from stages.seeding import stream

KINDS = ("bell", "book", "coin", "cup", "drum", "jar", "lamp", "ring", "rope", "vase")
ATTRIBUTES = ("chalk", "clay", "glass", "iron", "oak", "silk", "stone", "tin", "wax", "wheat")
OPTIONS: dict[str, tuple[str, ...]] = {
    "color": ("coal", "gold", "lime", "mint", "plum", "rose", "sand", "snow"),
    "crest": ("bee", "deer", "fox", "frog", "lion", "owl", "swan", "wolf"),
    "motif": ("bird", "fish", "leaf", "moon", "ship", "star", "sun", "tree"),
}
"""Group -> values; a value belongs to one group, so that it identifies the group."""
KINDS_PER_SHOP = 4
PAIRS_PER_KIND = 3
"""Distinct pairs of attributes among the items of a kind."""
VALUES_PER_GROUP = 3
TWINS = 0.75
"""Probability that a pair of attributes comes at both prices."""
LOWEST, CHEAP, DEAR, HIGHEST = 10, 39, 60, 99
"""The cheaper item with a pair of attributes costs LOWEST to CHEAP, the more expensive one DEAR to HIGHEST."""


@dataclass(frozen=True)
class Item:
    name: str
    kind: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: int

    @property
    def title(self) -> str:
        return f"{' '.join(self.attributes)} {self.kind}"

    @property
    def text(self) -> str:
        """As a page of results shows it: "Kelmar oak wax lamp 45"."""
        return f"{self.name} {self.title} {self.price}"


@dataclass(frozen=True)
class Goal:
    """A customer's request."""

    kind: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    """Group -> value."""
    price_upper: int

    @property
    def text(self) -> str:
        """ "want oak wax lamp, color lime, motif star, under 60." """
        options = "".join(f", {group} {value}" for group, value in self.options.items())
        return f"want {' '.join(self.attributes)} {self.kind}{options}, under {self.price_upper}."

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Goal:
        return cls(spec["kind"], tuple(spec["attributes"]), dict(spec["options"]), spec["price_upper"])


@dataclass(frozen=True)
class Catalogue:
    """About 21 items: each kind has three pairs of attributes, each at a low price, a high one or both."""

    items: tuple[Item, ...]

    @cached_property
    def by_name(self) -> dict[str, Item]:
        return {item.name.lower(): item for item in self.items}

    def to_json(self) -> str:
        return "\n".join(["[", ",\n".join(json.dumps(asdict(item)) for item in self.items), "]"]) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Catalogue:
        """The inverse of `to_json`. Raises ValueError (json.JSONDecodeError), KeyError or TypeError for other text."""

        def read(item: Mapping[str, Any]) -> Item:
            options = {group: tuple(values) for group, values in item["options"].items()}
            return Item(item["name"], item["kind"], tuple(item["attributes"]), options, item["price"])

        return cls(tuple(map(read, json.loads(text))))


@lru_cache(maxsize=256)
def make_catalogue(split: Split, number: int) -> Catalogue:
    """Catalogue `number` of a split; deterministic."""
    rng = stream("shop.catalogue", split, number)
    names = rng.sample(names_of(split), 2 * KINDS_PER_SHOP * PAIRS_PER_KIND)
    items = []
    for kind in rng.sample(KINDS, KINDS_PER_SHOP):
        options = {group: tuple(sorted(rng.sample(values, VALUES_PER_GROUP))) for group, values in OPTIONS.items()}
        for attributes in _pairs(rng):
            prices = [rng.randint(LOWEST, CHEAP), rng.randint(DEAR, HIGHEST)]
            # Most pairs come at both prices, so that the attributes alone do not identify the requested item.
            for price in prices if rng.random() < TWINS else [rng.choice(prices)]:
                items.append(Item(names.pop(), kind, attributes, options, price))
    rng.shuffle(items)
    return Catalogue(tuple(items))


def _pairs(rng: Random) -> list[tuple[str, ...]]:
    """Distinct pairs of attributes, each sorted. Pairs may overlap, so that a search also finds near matches."""
    pairs: list[tuple[str, ...]] = []
    pool = rng.sample(ATTRIBUTES, PAIRS_PER_KIND + 1)
    while len(pairs) < PAIRS_PER_KIND:
        pair = tuple(sorted(rng.sample(pool, 2)))
        if pair not in pairs:
            pairs.append(pair)
    return pairs


def draw_goal(catalogue: Catalogue, options: int, rng: Random) -> Goal:
    """A goal with `options` options that one item, drawn at random, matches fully.

    The price limit is between the item's price and that of its more expensive twin.
    """
    item = rng.choice(catalogue.items)
    groups = sorted(rng.sample(sorted(item.options), options))
    wanted = {group: rng.choice(item.options[group]) for group in groups}
    upper = rng.choice((40, 50, 60)) if item.price <= CHEAP else 100
    return Goal(item.kind, item.attributes, wanted, upper)
