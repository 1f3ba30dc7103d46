"""Tasks of the factbook domain: recipes, splits, wordings, and episodes with and without a book."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from factbook_books import BOOKS, PROFILES, question

from stages.environments.factbook import FactbookDomain, FactbookEnvironment, FactbookSettings
from stages.environments.factbook.book import REGIONS
from stages.environments.factbook.environment import CLOSED_INSTRUCTIONS, CLOSED_USAGE, INSTRUCTIONS
from stages.environments.factbook.facts import KNOWN
from stages.environments.factbook.questions import KINDS, prompt
from stages.environments.pages.environment import NO_HIT, USAGE
from stages.environments.protocol import Domain, Environment
from stages.records.task import SPLITS, Task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def domain() -> FactbookDomain:
    return FactbookDomain()


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "data/raw/factbook.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tasks(domain: FactbookDomain, folder: Path, records: list[dict[str, Any]]) -> list[Task]:
    return domain.build(records, folder, 1)


def started(domain: FactbookDomain, folder: Path, task: Task) -> FactbookEnvironment:
    environment = domain.make(folder)
    environment.reset(task)
    return environment


def test_implements_domain_and_environment_protocols(domain: FactbookDomain, folder: Path) -> None:
    assert isinstance(domain, Domain)
    assert isinstance(domain.make(folder), Environment)


def test_every_answer_follows_from_the_pages_as_shown(domain: FactbookDomain, folder: Path, tasks: list[Task]) -> None:
    """Reads the shown pages in another way than the code that made the answers: the first number, or the listed names."""
    checked: Counter[str] = Counter()

    def first_number(text: str) -> float:
        digits, scale = re.search(r"(-?[\d,]*\d(?:\.\d+)?)(?: (million|billion|trillion))?", text).groups()  # type: ignore[union-attr]
        return float(digits.replace(",", "")) * {None: 1, "million": 1e6, "billion": 1e9, "trillion": 1e12}[scale]

    for task in tasks:
        environment = started(domain, folder, task)
        shown = [environment.page(hop["page"]) for hop in task.spec["chain"]]
        kind, answer = task.spec["kind"], task.spec["answer"]
        if kind in ("fact", "neighbour_fact", "superlative_fact", "second_neighbour_fact", "superlative_neighbour_fact"):
            assert answer in shown[-1]
        elif kind in ("superlative",):
            assert f"{answer} " in shown[0]
        elif kind in ("neighbour", "second_neighbour"):
            borders = dict(
                re.findall(r"([A-Z][^\d,;:(]*?) (?:\([^)]*\) )?([\d,.]+) km", shown[-1].split("border countries: ")[1])
            )
            lengths = {name: first_number(length) for name, length in borders.items() if name not in task.spec["countries"]}
            assert max(lengths, key=lambda name: lengths[name]) in task.spec["accepted"]
        elif kind == "comparison" and shown[0][0].isdigit() and shown[1][0].isdigit():
            names = [hop["page"].split(":")[0] for hop in task.spec["chain"]]
            numbers = dict(zip(names, map(first_number, shown), strict=True))
            lowest = re.search(r"\b(lower|smaller|shorter)\b", task.prompt)
            assert answer == (min if lowest else max)(numbers, key=lambda name: numbers[name])
        else:
            continue
        checked[kind] += 1
    assert checked.total() > 0.7 * len(tasks)
    assert checked["comparison"] > 50


def test_either_name_of_a_country_is_right(domain: FactbookDomain, folder: Path, tasks: list[Task]) -> None:
    """The United States' neighbours write "US"."""
    task = next(task for task in tasks if task.spec["answer"] == "United States")
    for given in ("United States", "US", "the United States of America"):
        assert started(domain, folder, task).step(f"answer {given}").reward == 1.0


def test_each_right_value_is_accepted(domain: FactbookDomain, folder: Path, tasks: list[Task]) -> None:
    """The profile gives the adjective "Saudi or Saudi Arabian", and Belize exports as much to the UK as to the US."""
    for answer, also in (("Saudi or Saudi Arabian", ["Saudi", "Saudi Arabian"]), ("UK", ["US", "United States"])):
        task = next(task for task in tasks if task.spec["answer"] == answer)
        for given in (answer, *also):
            assert started(domain, folder, task).step(f"answer {given}").reward == 1.0
        assert started(domain, folder, task).step("answer Atlantis").reward == 0.0


def test_facts_that_models_know_are_never_asked_of_a_named_country(records: list[dict[str, Any]]) -> None:
    assert not [record for record in records if record["kind"] == "fact" and record["facts"][0] in KNOWN]
    assert [record for record in records if set(record["facts"]) & set(KNOWN)]


def test_shipped_records_equal_recipes(domain: FactbookDomain, records: list[dict[str, Any]]) -> None:
    assert records == list(domain.recipes(len(records), 0))
    assert Counter(record["split"] for record in records) == {"train": 600, "valid": 75, "test": 625}
    assert {record["kind"] for record in records} == set(KINDS)
    for record in records:
        domain.check(record)


def test_no_question_is_asked_twice(tasks: list[Task]) -> None:
    """Contract: no two tasks read the same pages for the same fact, whatever the wording, order or unit."""
    assert len({task.prompt for task in tasks}) == len(tasks)
    facts = [task for task in tasks if task.spec["kind"] in ("fact", "conversion")]
    asked = {(task.spec["chain"][0]["page"], re.sub(r" in .*| of [A-Z].*", "", task.prompt)) for task in facts}
    assert len(asked) == len(facts)
    pairs = [frozenset(hop["page"] for hop in task.spec["chain"]) for task in tasks if task.spec["kind"] == "comparison"]
    assert max(Counter(pairs).values()) <= 2  # a page may hold two facts


def test_wordings_vary_and_name_the_subject(tasks: list[Task]) -> None:
    openings: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for task in tasks:
        openings[task.spec["kind"]].add(task.prompt.split(" ")[0])
    assert {kind for kind, found in openings.items() if len(found) < 2} <= {"comparison"}
    assert prompt(question("fact", "Netherlands", facts=("median_age",))).count("the Netherlands") == 1
    assert "the Bahamas" in prompt(question("neighbour", "The Bahamas"))


def test_regions_of_the_splits_are_disjoint(domain: FactbookDomain, tasks: list[Task], folder: Path) -> None:
    """Contract: no training page is about a country of the panel."""
    regions = [region for split in SPLITS for region in REGIONS[split]]
    assert len(set(regions)) == len(regions)
    assert set(regions) == {profile.region for profile in PROFILES}
    entities = {split: set().union(*(domain.entities(task) for task in tasks if task.split == split)) for split in SPLITS}
    titles = {split: {page.title.split(":")[0] for page in BOOKS[split].world().pages} for split in SPLITS}
    for split in SPLITS:
        assert entities[split] <= titles[split]
    assert not titles["train"] & titles["test"]
    assert not titles["valid"] & (titles["train"] | titles["test"])


def test_expert_solves_tasks_with_all_the_evidence(domain: FactbookDomain, folder: Path, tasks: list[Task]) -> None:
    environment = domain.make(folder)
    for task in tasks[::3]:
        environment.reset(task)
        turns = 0
        while (action := domain.expert(environment)) is not None:
            assert action in environment.admissible()
            step, turns = environment.step(action), turns + 1
        assert step.terms == {"exact_match": 1.0, "evidence": 1.0}
        assert turns <= 2 * task.difficulty + 1


def test_episode_by_hand(folder: Path, tasks: list[Task]) -> None:
    domain = FactbookDomain(FactbookSettings(max_turns=20))
    task = next(task for task in tasks if task.spec["kind"] == "comparison")
    first, second = (hop["page"] for hop in task.spec["chain"])
    environment = started(domain, folder, task)
    for refused in ("open 1", "search", "look up Chad", "answer "):
        step = environment.step(refused)
        assert (step.accepted, step.observation.text) == (False, USAGE)
    assert environment.step("search 日本").observation.text == NO_HIT
    listed = environment.step(f"search {first}").observation.text.splitlines()
    assert (listed[0], len(listed)) == (f"1 {first}", 3)
    assert environment.step("open 1").observation.text == environment.page(first)
    for refused in ("open 0", "open 4", "open ١", "open one"):
        assert not environment.step(refused).accepted
    step = environment.step("answer Atlantis")
    assert (step.reward, step.terminated, step.terms) == (0.0, True, {"exact_match": 0.0, "evidence": 0.5})
    assert second not in environment.snapshot().opened


def test_closed_book_has_one_turn_and_no_tools(folder: Path, tasks: list[Task]) -> None:
    domain = FactbookDomain(FactbookSettings(closed_book=True))
    environment = domain.make(folder / "nowhere")
    assert environment.reset(tasks[0]).text == CLOSED_INSTRUCTIONS
    step = environment.step("search Chad")
    assert (step.accepted, step.observation.text, step.truncated, step.reward) == (False, CLOSED_USAGE, True, 0.0)
    environment.reset(tasks[0])
    assert domain.expert(environment) == f"answer {tasks[0].spec['answer']}"
    assert environment.step(domain.expert(environment)).reward == 1.0


def test_instructions_and_length_of_pages(folder: Path, tasks: list[Task]) -> None:
    domain = FactbookDomain(FactbookSettings(instructions=True, page_words=60))
    environment = domain.make(folder)
    assert environment.reset(tasks[0]).text == INSTRUCTIONS
    environment = started(domain, folder, next(task for task in tasks if task.split == "test"))
    assert environment.page("Germany: Land boundaries").startswith("total: 3,714 km; border countries: Austria 801 km")
    assert environment.page("Kosovo: Capital").endswith(" ...") or len(environment.page("Kosovo: Capital").split()) <= 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "riddle"}, "'kind' must be one of"),
        ({"subjects": ["Chad", "Niger"]}, "'subjects' must be 1 names"),
        ({"subjects": [7]}, "'subjects' must be 1 names"),
        ({"subjects": ["Atlantis"]}, "is called 'Atlantis'"),
        ({"facts": []}, "'facts' must be 1 names"),
        ({"facts": ["capital"]}, "'facts' holds 'capital'"),
        ({"lowest": 1}, "'lowest' must be bool"),
        ({"split": "test"}, "no country of the test regions"),
    ],
)
def test_check_says_what_is_wrong(domain: FactbookDomain, change: dict[str, Any], message: str) -> None:
    record = {"task_id": "x", "split": "train", "kind": "fact", "subjects": ["Chad"], "facts": ["area"], "lowest": False}
    domain.check(record)
    with pytest.raises(ValueError, match=message):
        domain.check({**record, **change})
