"""Catalogues: items that differ in kind, attributes, options and price, and what customers ask for.

A catalogue is a pure function of (split, number). Its items' names are those of the encyclopaedia's pages for that split: names
of train, valid and test shops are disjoint. Kinds, attributes and options are common words that all shops share.
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
"""Group -> its values; no value is in two groups, so that a value alone says which group it is for."""
KINDS_PER_SHOP = 4
PAIRS_PER_KIND = 3
"""Different pairs of attributes among the items of a kind."""
VALUES_PER_GROUP = 3
TWINS = 0.75
"""Share of the pairs of attributes that come at both prices."""
LOWEST, CHEAP, DEAR, HIGHEST = 10, 39, 60, 99
"""Prices of the cheaper item of a pair of attributes are LOWEST to CHEAP, those of the dearer one DEAR to HIGHEST."""


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
    """What a customer asks for."""

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
    """About 21 items: in each kind three pairs of attributes, each cheap, dear or both."""

    items: tuple[Item, ...]

    @cached_property
    def by_name(self) -> dict[str, Item]:
        return {item.name.lower(): item for item in self.items}

    def to_json(self) -> str:
        return "\n".join(["[", ",\n".join(json.dumps(asdict(item)) for item in self.items), "]"]) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Catalogue:
        """Raises ValueError (json.JSONDecodeError), KeyError or TypeError for text that `to_json` did not write."""
        return cls(
            tuple(
                Item(
                    item["name"],
                    item["kind"],
                    tuple(item["attributes"]),
                    {group: tuple(values) for group, values in item["options"].items()},
                    item["price"],
                )
                for item in json.loads(text)
            )
        )


@lru_cache(maxsize=256)
def make_catalogue(split: Split, number: int) -> Catalogue:
    """Catalogue `number` of a split; the same arguments always give the same items."""
    rng = stream("shop.catalogue", split, number)
    names = rng.sample(names_of(split), 2 * KINDS_PER_SHOP * PAIRS_PER_KIND)
    items = []
    for kind in rng.sample(KINDS, KINDS_PER_SHOP):
        options = {group: tuple(sorted(rng.sample(values, VALUES_PER_GROUP))) for group, values in OPTIONS.items()}
        for attributes in _pairs(rng):
            prices = [rng.randint(LOWEST, CHEAP), rng.randint(DEAR, HIGHEST)]
            # Most pairs come at both prices, so that what is asked for can't be told from the attributes alone.
            for price in prices if rng.random() < TWINS else [rng.choice(prices)]:
                items.append(Item(names.pop(), kind, attributes, options, price))
    rng.shuffle(items)
    return Catalogue(tuple(items))


def _pairs(rng: Random) -> list[tuple[str, ...]]:
    """Different pairs of attributes, each sorted; pairs may share one, so that a search finds what is almost right as well."""
    pairs: list[tuple[str, ...]] = []
    pool = rng.sample(ATTRIBUTES, PAIRS_PER_KIND + 1)
    while len(pairs) < PAIRS_PER_KIND:
        pair = tuple(sorted(rng.sample(pool, 2)))
        if pair not in pairs:
            pairs.append(pair)
    return pairs


def draw_goal(catalogue: Catalogue, options: int, rng: Random) -> Goal:
    """What a customer who has one item of the catalogue in mind asks for, with so many options; that item matches fully.

    The price limit lies between the item's price and that of a dearer twin.
    """
    item = rng.choice(catalogue.items)
    groups = sorted(rng.sample(sorted(item.options), options))
    wanted = {group: rng.choice(item.options[group]) for group in groups}
    upper = rng.choice((40, 50, 60)) if item.price <= CHEAP else 100
    return Goal(item.kind, item.attributes, wanted, upper)
