"""Facts that questions ask for: where they stand in a profile, their units and the words for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from stages.environments.factbook.profiles import Profile
from stages.environments.search.scoring import normalize
from stages.records.amounts import AMOUNT, amount

COUNT = "count"
"""Unit of what is counted: questions do not name it."""
_METRES = r"-?[\d,]+(?:\.\d+)? m\b"
_ABOVE_SEA = r".*? (-?[\d,]+(?:\.\d+)?) m\b"
_SHARE = r"([^\d,;:()]+?)(?: (?:about|approximately|at least|over))? ([\d.]+)(?:%?-[\d.]+)?%"
"""Pattern of an entry in a list of shares, two groups: "Turkish 70-75%"."""
_REST = ("other", "unspecified")
"""Words that begin an entry which is no name."""


@dataclass(frozen=True)
class Fact:
    """`part` of the field `page`; `pattern` matches at the part's beginning and its group is the value. With a `unit` the value
    is a number. `sizes`: the comparative and superlative words for more and less. `several`: how a page gives more than one value
    that is right: a list of shares, whose largest is asked for, or names with "or" between them."""

    noun: str
    page: str
    part: str = ""
    unit: str = ""
    pattern: str = r"\$?" + AMOUNT
    sizes: tuple[str, str, str, str] = ("higher", "lower", "highest", "lowest")
    several: Literal["", "shares", "or"] = ""

    @property
    def asked(self) -> str:
        return f"{self.noun} in {self.unit}" if self.unit not in ("", COUNT) else self.noun


_PER_100 = "subscriptions per 100 inhabitants"
_LARGER = ("larger", "smaller", "largest", "smallest")
_LONGER = ("longer", "shorter", "longest", "shortest")

NUMBERS = {
    "area": Fact("total area", "Area", "total", "square kilometres", sizes=_LARGER),
    "borders": Fact("total length of the land borders", "Land boundaries", "total", "kilometres", sizes=_LONGER),
    "coastline": Fact("length of the coastline", "Coastline", "", "kilometres", sizes=_LONGER),
    "summit": Fact("elevation of the highest point", "Elevation extremes", "highest point", "metres", _ABOVE_SEA),
    "population": Fact("population", "Population", "", COUNT, sizes=_LARGER),
    "median_age": Fact("median age", "Median age", "total", "years"),
    "growth": Fact("population growth rate", "Population growth rate", "", "percent a year"),
    "births": Fact("birth rate", "Birth rate", "", "births per 1,000 people"),
    "deaths": Fact("death rate", "Death rate", "", "deaths per 1,000 people"),
    "infant_mortality": Fact("infant mortality rate", "Infant mortality rate", "total", "deaths per 1,000 live births"),
    "life_expectancy": Fact("life expectancy at birth", "Life expectancy at birth", "total population", "years"),
    "fertility": Fact("total fertility rate", "Total fertility rate", "", "children per woman"),
    "urban": Fact("urban share of the population", "Urbanization", "urban population", "percent"),
    "literacy": Fact("literacy rate of the total population", "Literacy", "total population", "percent"),
    "unemployment": Fact("unemployment rate", "Unemployment rate", "", "percent"),
    "gdp_per_person": Fact("GDP per person at purchasing power parity", "GDP - per capita (PPP)", "", "US dollars"),
    "debt": Fact("public debt", "Public debt", "", "percent of GDP"),
    "inflation": Fact("inflation rate", "Inflation rate (consumer prices)", "", "percent"),
    "electricity": Fact("electricity production", "Electricity - production", "", "kilowatt-hours"),
    "mobiles": Fact("number of mobile phones per 100 inhabitants", "Telephones - mobile cellular", _PER_100, COUNT),
    "internet": Fact("share of the population that uses the internet", "Internet users", "percent of population", "percent"),
    "airports": Fact("number of airports", "Airports", "", COUNT, sizes=_LARGER),
    "railways": Fact("total length of the railways", "Railways", "total", "kilometres", sizes=_LONGER),
    "roadways": Fact("total length of the roads", "Roadways", "total", "kilometres", sizes=_LONGER),
}  # fmt: skip
NAMES = {
    "summit_name": Fact("highest point", "Elevation extremes", "highest point", pattern=rf"([^;(]+?) {_METRES}"),
    "export_partner": Fact("largest export partner", "Exports - partners", pattern=_SHARE, several="shares"),
    "import_partner": Fact("largest import partner", "Imports - partners", pattern=_SHARE, several="shares"),
    "currency": Fact("currency code", "Exchange rates", pattern=r"[^;]*?\(([A-Z]{3})\)"),
    "independence": Fact("year of independence", "Independence", pattern=r"(?:\d{1,2} )?(?:[A-Z][a-z]+ )?(\d{4})\b"),
    "ethnic_group": Fact("largest ethnic group", "Ethnic groups", pattern=_SHARE, several="shares"),
}  # fmt: skip
KNOWN = {
    "capital": Fact("capital", "Capital", "name", pattern=r"(?![^;:]*\(administrative capital\))([^;:()\d]+?)(?:;|$| \()"),
    "adjective": Fact(
        "adjective of nationality", "Nationality", "adjective", pattern=r"(?!none\b)([^;:(),]+?)(?:;|$)", several="or"
    ),
    "internet_code": Fact("internet country code", "Internet country code", pattern=r"(\.[a-z]{2})\b"),
}
"""Facts that language models know without searching: asked only about countries that have to be found first."""
FACTS = {**NUMBERS, **NAMES, **KNOWN}
CONVERSIONS = {
    "square kilometres": ("hectares", Decimal(100)),
    "kilometres": ("metres", Decimal(1000)),
    "metres": ("kilometres", Decimal("0.001")),
    "years": ("months", Decimal(12)),
    "percent": ("per thousand", Decimal(10)),
    "US dollars": ("US cents", Decimal(100)),
}
"""Unit -> other unit and factor; products of decimal numbers, so that answers are exact."""


def part_of(text: str, part: str) -> str:
    """The text from `part` of a page on: "17.4 years; male: ..." of "total: 17.4 years; male: ..."; "" if it has none."""
    if not part:
        return text
    found = re.search(rf"(?:^|; ){re.escape(part)}: ", text)
    return text[found.end() :] if found else ""


def value(profile: Profile, fact: Fact) -> str:
    """A fact's value as the profile has it, such as "1.284 million". Raises ValueError if it has none, or its list does not begin
    with the largest share."""
    text = part_of(profile.pages.get(fact.page, ""), fact.part)
    found = re.match(fact.pattern, text)
    if not found:
        raise ValueError(f"{profile.name} has no {fact.noun}")
    name = found.group(1).strip()
    if fact.several == "shares" and name not in _largest(text):
        raise ValueError(f"{profile.name}: {name} is not the {fact.noun}")
    return name


def _largest(text: str) -> list[str]:
    """The names with the largest share in a list such as "UK 20.5%, US 20.5%, Mexico 6%"."""
    entries = [(name.strip(), Decimal(share)) for name, share in re.findall(_SHARE, re.sub(r"\s*\([^)]*\)", "", text))]
    shares = {name: share for name, share in entries if not name.startswith(_REST)}
    return [name for name, share in shares.items() if share == max(shares.values())]


def also_right(profile: Profile, fact: Fact) -> list[str]:
    """Other texts that answer as well as `value`: names with the same share, and each name of "Saudi or Saudi Arabian"."""
    found = value(profile, fact)
    if fact.several == "shares":
        return [name for name in _largest(profile.pages[fact.page]) if name != found]
    return found.split(" or ") if fact.several == "or" and " or " in found else []


def written(number: Decimal) -> str:
    """A number without exponent and trailing zeros: "440,000", "17.4"."""
    return f"{number.normalize():,f}"


def same_answer(given: str, gold: str) -> bool:
    """Whether two answers are equal: as numbers if `gold` is one, else as normalised texts."""
    wanted = amount(gold)
    return amount(given) == wanted if wanted is not None else normalize(given) == normalize(gold)


def canonical(answer: str) -> str:
    """A text that is the same for equal answers."""
    number = amount(answer)
    return written(number) if number is not None else normalize(answer)
