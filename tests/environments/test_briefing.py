"""The briefing domain: what a brief states, its hidden quality and its visible demands."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from stages.environments.briefing import BriefingDomain, BriefingEnvironment, BriefingSettings
from stages.environments.briefing.brief import BEST, Asked, checklist, demands, paraphrases, quality, read, write
from stages.environments.search.scoring import common_length
from stages.records.task import Task

ASKED = Asked(
    "Kelmar",
    (("ally", "Corbas"), ("founder", "Dorvin"), ("patron", "Mirkos"), ("rival", "Teldin")),
    ("rival", "founder"),
    "list",
    7,
)
PROSE = replace(ASKED, form="prose", words=8)


def test_perfect_brief_in_each_form() -> None:
    assert write(ASKED) == "Kelmar: rival Teldin; founder Dorvin."
    assert write(PROSE) == "Kelmar has rival Teldin and founder Dorvin."
    assert quality(ASKED, write(ASKED)) == quality(PROSE, write(PROSE)) == BEST


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Kelmar: founder Dorvin; rival Teldin.", 5.5),  # order: half
        ("Kelmar: rival Teldin.", 3.5),  # one missing: 2 + 0.5 + 1
        ("Kelmar: rival Teldin; founder Mirkos.", 2.25),  # one wrong: 2 - 1 + 0.5 + 1 - its value, a word of padding
        ("Kelmar: rival Teldin; founder Dorvin; ally Corbas.", 5.5),  # one too many
        ("Kelmar has rival Teldin and founder Dorvin.", 6 - 1 / 3),  # the other form
        ("Kelmar: rival Teldin; rival Teldin; founder Dorvin.", 5.5),  # repeated
        ("", 0.0),
        ("an excellent brief", 1 / 3 - 3 / 4),  # three words of padding, within the limit
    ],
)
def test_quality_by_hand(text: str, expected: float) -> None:
    assert quality(ASKED, text) == pytest.approx(expected)


def test_stuffing_is_padding() -> None:
    stuffed = "rival founder Teldin Dorvin"
    assert read(ASKED, stuffed).right == ()
    assert quality(ASKED, stuffed) < 0
    assert quality(ASKED, write(ASKED) + " very good" * 40) == pytest.approx(5 + 2 / 3 - 2)


def test_facts_are_read_in_other_words() -> None:
    text = "Of Kelmar, its rival is Teldin, its founder: Dorvin."
    assert read(ASKED, text).right == ("rival", "founder")
    assert read(ASKED, text).padding == 0
    numbers = replace(ASKED, facts=(("population", "1,284"), ("total area", "78 square kilometres")), wanted=("population",))
    assert read(numbers, "population 1,284,000").wrong == ("population",)
    assert read(numbers, "population is 1,284. Total area 78 square kilometres").right == ("population", "total area")


def test_demands_are_visible_form() -> None:
    assert demands(ASKED, "Kelmar: nonsense") == {"entity": True, "form": True, "words": True}
    assert demands(PROSE, "Kelmar: nonsense")["form"] is False
    assert demands(ASKED, "Kelmar: " + "word " * 7)["words"] is False


ITEMS = (
    "begins with Kelmar",
    'is a list that begins with "Kelmar:"',
    "has at most 7 words",
    "says that the rival is Teldin",
    "says that the founder is Dorvin",
    "keeps the order rival, founder",
    "says nothing wrong, nothing twice and nothing else",
)


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("Kelmar: rival Teldin; founder Dorvin.", "1111111"),
        ("Kelmar: founder Dorvin; rival Teldin.", "1111101"),
        ("Kelmar: rival Teldin.", "1111011"),
        ("Kelmar: rival Teldin; founder Mirkos.", "1111010"),
        ("Kelmar: rival Teldin; founder Dorvin; ally Corbas.", "1111110"),
        ("Kelmar has rival Teldin and founder Dorvin.", "1011111"),
        ("an excellent and long brief of nine words indeed", "0000000"),
        ("", "0000000"),
    ],
)
def test_checklist_by_hand(text: str, met: str) -> None:
    """What a perfect brief meets, each demand and each fact on its own."""
    assert checklist(ASKED, text) == dict(zip(ITEMS, (one == "1" for one in met), strict=True))


def test_a_checklist_s_items_depend_on_the_task_alone() -> None:
    for asked in (ASKED, PROSE):
        assert list(checklist(asked, "")) == list(checklist(asked, write(asked)))
        assert all(checklist(asked, write(asked)).values())


def test_references_state_the_facts() -> None:
    for text in paraphrases(ASKED):
        assert read(ASKED, text).right == ASKED.wanted
    assert len(set(paraphrases(ASKED))) == 3


def test_common_subsequence() -> None:
    assert common_length("abcd", "bd") == 2
    assert common_length("", "a") == 0


def test_reward_holds_nothing_of_the_quality() -> None:
    """Contract: two briefs of the same form have the same reward, whatever they state."""
    task = Task("t", "briefing", "train", 0, "", {**vars(ASKED)}, 2.0)
    environment = BriefingEnvironment(1)
    rewards = []
    for text in (write(ASKED), "Kelmar: rival Dorvin; founder Teldin."):
        environment.reset(task)
        step = environment.step(text)
        rewards.append(step.reward)
        assert step.terms["quality"] == pytest.approx(quality(ASKED, text) / BEST)
        assert step.terms["success"] == float(text == write(ASKED))
    assert rewards == [1.0, 1.0]
    environment.reset(task)
    silent = environment.step("  ")
    assert (silent.accepted, silent.truncated, silent.reward) == (False, True, 0.0)


@pytest.mark.parametrize("source", ["invented", "factbook"])
def test_recipes_of_both_sources(source, tmp_path: Path) -> None:
    domain = BriefingDomain(BriefingSettings(source=source))
    records = list(islice(domain.recipes(104, 0), 104))
    for record in records:
        domain.check(record)
    tasks = domain.build(records, tmp_path, 1)
    for task in tasks:
        best = domain.references(task)[0]
        assert domain.quality(task, [best]) == BEST
        assert all(noun in task.prompt for noun in task.spec["wanted"])
    names = {split: set().union(*(domain.entities(task) for task in tasks if task.split == split)) for split in ("train", "test")}
    assert not names["train"] & names["test"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wanted": ["rival", "rival"]}, "different nouns"),
        ({"wanted": ["mayor"]}, "different nouns"),
        ({"form": "poem"}, "list or prose"),
        ({"words": 2}, "at least the"),
        ({"facts": [["ally"]]}, "pairs of noun and value"),
        ({"facts": [["ally", "A"], ["Ally", "B"]]}, "twice"),
        ({"entity": "..."}, "no words"),
    ],
)
def test_wrong_records_are_refused(change, says: str) -> None:
    domain = BriefingDomain()
    record = next(domain.recipes(1, 0)) | change
    with pytest.raises(ValueError, match=says):
        domain.check(record)
