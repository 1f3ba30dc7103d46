"""Answers of the factbook domain: facts, numbers and names by hand, and the index of pages."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from factbook_books import BOOKS, PROFILES, question

from stages.environments.factbook.book import Book
from stages.environments.factbook.facts import FACTS, also_right, canonical, same_answer, value, written
from stages.environments.factbook.profiles import PAGES, Profile
from stages.environments.factbook.questions import Question, solve
from stages.environments.pages.index import PageIndex
from stages.environments.pages.world import Page, World
from stages.records.amounts import amount


@pytest.mark.parametrize(
    ("split", "asked", "answer", "pages"),
    [
        ("train", question("fact", "Chad", facts=("median_age",)), "17.4", ["Chad: Median age"]),
        ("train", question("fact", "Chad", facts=("area",)), "1.284 million", ["Chad: Area"]),
        ("train", question("conversion", "Chad", facts=("summit",)), "3.415", ["Chad: Elevation extremes"]),
        ("test", question("conversion", "Germany", facts=("coastline",)), "2,389,000", ["Germany: Coastline"]),
        ("train", question("neighbour", "Chad"), "Central African Republic", ["Chad: Land boundaries"]),
        (
            "test",
            question("comparison", "Germany", "Austria", facts=("population",), lowest=True),
            "Austria",
            ["Germany: Population", "Austria: Population"],
        ),
        (
            "train",
            question("neighbour_fact", "Chad", facts=("capital",)),
            "Bangui",
            ["Chad: Land boundaries", "Central African Republic: Capital"],
        ),
        (
            "test",
            question("second_neighbour", "Liechtenstein"),
            "Italy",
            ["Liechtenstein: Land boundaries", "Switzerland: Land boundaries"],
        ),
        (
            "test",
            question("neighbours_compared", "Luxembourg", facts=("population",)),
            "Germany",
            ["Luxembourg: Land boundaries", "Belgium: Population", "Germany: Population"],
        ),
    ],
)
def test_answers_by_hand(split: Any, asked: Question, answer: str, pages: list[str]) -> None:
    """Read off the profiles by hand: Chad's longest border is the 1,556 km with the Central African Republic, Switzerland's the
    698 km with Italy; Luxembourg's two longest are Belgium's (130 km) and Germany's (128 km)."""
    found, reading = solve(asked, BOOKS[split])
    assert (found, [hop.page for hop in reading.hops]) == (answer, pages)


def test_superlative_by_hand() -> None:
    profiles = [
        Profile(name, (), "africa", {"Location": "Western Africa, by the sea", "Area": f"total: {area}", "Population": "5"})
        for name, area in (("A", "9 sq km"), ("B", "1.2 million sq km"), ("C", "NA"), ("D", "10 sq km"), ("E", "700,000 sq km"))
    ]
    book = Book(profiles, "train")
    asked = question("superlative", "Western Africa", facts=("area",))
    assert solve(asked, book)[0] == "B"
    assert solve(question("superlative", "Western Africa", facts=("area",), lowest=True), book)[0] == "A"
    (page,) = (page for page in book.world().pages if page.title == "Western Africa: comparison of total area")
    assert page.text == "total area in square kilometres: A 9; B 1.2 million; D 10; E 700,000"
    with pytest.raises(ValueError, match=r"A and B and C and D and E tie|no comparison"):
        solve(question("superlative", "Western Africa", facts=("population",)), book)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (question("fact", "Germany", facts=("area",)), "no country of the train regions"),
        (question("fact", "Chad", facts=("unemployment",)), "has no unemployment rate"),
        (question("fact", "Chad", facts=("coastline",)), "is 0"),
        (question("neighbour", "Madagascar"), "no ranking of its neighbours"),
        (question("neighbours_compared", "Canada", facts=("area",)), "borders only"),
        (question("comparison", "Chad", "Chad", facts=("area",)), "one page answers more than one hop"),
        (question("superlative", "Atlantis", facts=("area",)), "no comparison"),
    ],
)
def test_questions_without_one_answer_are_refused(asked: Question, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(asked, BOOKS["train"])


PAGES_OF_LISTS = {
    "tie": {"Exports - partners": "Croatia 22.7%, Serbia 22.7%, Slovenia 7.8% (2012 est.)"},
    "others": {"Ethnic groups": "Chhettri 16.6%, Magar (Nepal) 7.1%, other 29.6% (2011 est.)"},
    "range": {"Ethnic groups": "Turkish 70-75%, Kurdish 18%, other minorities 7-12% (2008 est.)"},
    "at least": {"Ethnic groups": "Bengali at least 98%, ethnic groups 1.1%"},
    "not first": {"Ethnic groups": "Kuwaiti 31.3%, other Arab 27.9%, Asian 37.8%, African 1.9%"},
    "no share": {"Ethnic groups": "over 200 African ethnic groups of which the majority are Bantu, about 45% of the population"},
    "two names": {"Nationality": "noun: Saudi(s); adjective: Saudi or Saudi Arabian"},
    "no adjective": {"Nationality": "noun: none; adjective: none"},
    "two capitals": {"Capital": "name: La Paz (administrative capital); Sucre (constitutional capital)"},
}


@pytest.mark.parametrize(
    ("pages", "fact", "answer", "also"),
    [
        ("tie", "export_partner", "Croatia", ["Serbia"]),
        ("others", "ethnic_group", "Chhettri", []),
        ("range", "ethnic_group", "Turkish", []),
        ("at least", "ethnic_group", "Bengali", []),
        ("two names", "adjective", "Saudi or Saudi Arabian", ["Saudi", "Saudi Arabian"]),
    ],
)
def test_all_right_values_of_a_fact_are_known(pages: str, fact: str, answer: str, also: list[str]) -> None:
    profile = Profile("A", (), "africa", PAGES_OF_LISTS[pages])
    assert (value(profile, FACTS[fact]), also_right(profile, FACTS[fact])) == (answer, also)


@pytest.mark.parametrize(
    ("pages", "fact"),
    [
        ("not first", "ethnic_group"),
        ("no share", "ethnic_group"),
        ("no adjective", "adjective"),
        ("two capitals", "capital"),
    ],
)
def test_values_that_do_not_answer_are_refused(pages: str, fact: str) -> None:
    with pytest.raises(ValueError, match=r"A has no|A: Kuwaiti is not the largest ethnic group"):
        value(Profile("A", (), "africa", PAGES_OF_LISTS[pages]), FACTS[fact])


def test_borders_in_parts_are_added() -> None:
    """China borders Russia twice, for 4,133 and 46 km: together more than its border with India."""
    borders = "total: 11,468 km; border countries: India 2,659 km, Mongolia 4,630 km, Russia (east) 4,133 km, Russia (west) 46 km"
    profile = Profile("China", (), "east-n-southeast-asia", {"Land boundaries": borders})
    assert Book([profile], "train").neighbours("China") == ["Mongolia", "Russia", "India"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1.284 million sq km", "1284000"),
        ("$2,600 (2014 est.)", "2600"),
        ("-0.17% (2015 est.)", "-0.17"),
        ("205 Million kWh", "205000000"),
        ("17.4 years", "17.4"),
        ("6.", "6"),
    ],
)
def test_amounts_by_hand(text: str, number: str) -> None:
    assert amount(text) == Decimal(number)


@pytest.mark.parametrize("text", ["NA%", "", "about 7", "$", "million", "less than 1"])
def test_texts_without_a_number(text: str) -> None:
    assert amount(text) is None


def test_answers_are_compared_as_numbers_or_as_names() -> None:
    assert same_answer("1,284,000 square kilometres", "1.284 million")
    assert not same_answer("1.284", "1.284 million")
    assert not same_answer("12.5", "1.25"), "punctuation matters in numbers"
    assert same_answer("the  bangui!", "Bangui")
    assert not same_answer("17", "Bangui")
    assert canonical("1.284 million") == canonical("1,284,000 km") == written(Decimal(1284000)) == "1,284,000"
    assert canonical("The Bangui") == "bangui"


def test_every_fact_is_in_many_profiles() -> None:
    for name, fact in FACTS.items():
        assert fact.page in PAGES
        found = 0
        for profile in PROFILES:
            try:
                found += bool(value(profile, fact))
            except ValueError:
                continue
        assert found > 100, name


def test_titles_that_begin_with_the_query_rank_first() -> None:
    """An expert's query must find the page, also where others share all its words or are shorter."""
    for book in BOOKS.values():
        world = book.world()
        index = PageIndex(world)
        for page in world.pages[::9]:
            assert page in index.search(page.title, 3)
    index = PageIndex(
        World((Page("Papua New Guinea: Area", "x"), Page("Guinea: Area", "long text " * 50), Page("Guinea: Area", "y")))
    )
    assert [page.text[0] for page in index.search("Guinea area", 2)] == ["y", "l"]
    assert index.search("?! ", 3) == index.search("nothing", 3) == []


def test_ties_are_ranked_in_the_order_of_pages() -> None:
    pages = tuple(Page(f"Borders {letter}", "same text") for letter in "dcab")
    assert PageIndex(World(pages)).search("border", 4) == list(pages)
    assert World.from_json(World(pages).to_json()) == World(pages)
