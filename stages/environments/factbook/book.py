"""The factbook's profiles by split: names, neighbours, comparisons within a region, and the pages that agents read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cached_property

from stages.environments.factbook.facts import NUMBERS, Fact, part_of, value
from stages.environments.factbook.profiles import Profile
from stages.environments.pages.world import Page, World
from stages.records.amounts import amount
from stages.records.task import Split

REGIONS: dict[Split, tuple[str, ...]] = {
    "train": (
        "africa",
        "australia-oceania",
        "central-america-n-caribbean",
        "east-n-southeast-asia",
        "north-america",
        "south-asia",
    ),
    "valid": ("south-america",),
    "test": ("central-asia", "europe", "middle-east"),
}
TABLE_SIZES = range(4, 17)
"""Numbers of countries that a comparison may have."""
_AREA = re.compile(r"((?:[A-Z][a-z]+ ?-?){1,3})(?=[,;]|$)")
_NEIGHBOUR = re.compile(r"([A-Z][^\d,;:]*?) ([\d,]+(?:\.\d+)?) km")


class Book:
    """The profiles of one split. A question that leaves the split can't be asked: methods raise ValueError for names and fields
    that it lacks, and for ties."""

    def __init__(self, profiles: Sequence[Profile], split: Split) -> None:
        self.split = split
        self.by_name = {profile.name: profile for profile in profiles if profile.region in REGIONS[split]}
        self._names = {name: one.name for one in self.by_name.values() for name in (*one.also, one.name)}

    def profile(self, name: str) -> Profile:
        if name not in self.by_name:
            raise ValueError(f"no country of the {self.split} regions is called {name!r}")
        return self.by_name[name]

    @cached_property
    def areas(self) -> dict[str, list[str]]:
        """Part of the world, as "Western Africa", -> its countries; those with a size in TABLE_SIZES."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, profile in sorted(self.by_name.items()):
            if area := _AREA.match(profile.pages.get("Location", "")):
                found[area.group(1).strip()].append(name)
        return {area: names for area, names in sorted(found.items()) if len(names) in TABLE_SIZES}

    def number(self, name: str, fact: Fact) -> Decimal:
        found = amount(value(self.profile(name), fact))
        if found is None:
            raise ValueError(f"{name}: {fact.noun} is not a number")
        return found

    def table(self, area: str, fact: Fact) -> dict[str, str]:
        """Country -> value, of the countries of an area that have one. Raises ValueError for an unknown area and fewer than 4."""
        rows = {}
        for name in self.areas.get(area, ()):
            try:
                rows[name] = value(self.profile(name), fact)
            except ValueError:
                continue
        if len(rows) not in TABLE_SIZES:
            raise ValueError(f"{area!r} has no comparison of the {fact.noun}")
        return rows

    def extreme(self, area: str, fact: Fact, *, lowest: bool) -> str:
        """The country of an area with the highest or lowest value."""
        numbers: dict[str, Decimal] = {name: amount(text) or Decimal(0) for name, text in self.table(area, fact).items()}
        return extreme_of(numbers, lowest=lowest)

    def neighbours(self, name: str, but: str = "") -> list[str]:
        """The countries that border `name`, also those of other splits, the longest border first, without `but`. Raises
        ValueError if there are none, or two borders are equally long."""
        text = re.sub(r"\s*\([^)]*\)", "", part_of(self.profile(name).pages.get("Land boundaries", ""), "border countries"))
        found: dict[str, Decimal] = defaultdict(Decimal)
        for neighbour, length in _NEIGHBOUR.findall(text):  # China has two borders with Russia
            found[neighbour] += amount(length) or Decimal(0)
        order = [one for one in sorted(found, key=lambda one: -found[one]) if self._names.get(one, one) != but]
        if not order or len({found[one] for one in order}) < len(order):
            raise ValueError(f"{name} has no ranking of its neighbours")
        return [self._names.get(one, one) for one in order]

    def world(self) -> World:
        """All pages: a country's fields, and the comparisons of the areas."""
        pages = [
            Page(f"{name}: {field}", text) for name, one in sorted(self.by_name.items()) for field, text in one.pages.items()
        ]
        for area in self.areas:
            for fact in NUMBERS.values():
                try:
                    rows = self.table(area, fact)
                except ValueError:
                    continue
                pages.append(Page(comparison(area, fact), f"{fact.asked}: " + "; ".join(" ".join(row) for row in rows.items())))
        return World(tuple(pages))


def comparison(area: str, fact: Fact) -> str:
    """The title of an area's comparison."""
    return f"{area}: comparison of {fact.noun}"


def extreme_of(numbers: Mapping[str, Decimal], *, lowest: bool) -> str:
    """The name with the highest or lowest number. Raises ValueError for a tie."""
    best = (min if lowest else max)(numbers.values())
    names = [name for name, number in numbers.items() if number == best]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} tie")
    return names[0]
