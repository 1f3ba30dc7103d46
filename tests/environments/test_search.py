"""The search domain: worlds, BM25, episodes, scoring, recipes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.environments.search import SearchDomain, SearchSettings
from stages.environments.search.environment import NO_HIT, USAGE, SearchEnvironment
from stages.environments.search.index import SearchIndex
from stages.environments.search.scoring import exact_match, token_f1
from stages.environments.search.world import FIRST, RELATIONS, SECOND, Page, World, make_world, names_of, question, split_of
from stages.records.task import SPLITS, Task

ROOT = Path(__file__).resolve().parents[2]
COUNT = 104


@pytest.fixture(scope="module")
def domain() -> SearchDomain:
    return SearchDomain()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def tasks(domain: SearchDomain, folder: Path) -> list[Task]:
    return domain.build(list(domain.recipes(COUNT, 3)), folder, 1)


def first_task(tasks: list[Task], hops: int) -> Task:
    return next(task for task in tasks if task.difficulty == hops)


def play_expert(domain: SearchDomain, environment: SearchEnvironment, task: Task) -> tuple[float, int]:
    environment.reset(task)
    turns = 0
    while True:
        action = domain.expert(environment)
        assert action in environment.admissible()
        step = environment.step(action)
        turns += 1
        if step.done:
            return step.reward, turns


def test_implements_domain_and_environment_protocols(domain: SearchDomain, folder: Path) -> None:
    assert isinstance(domain, Domain)
    assert isinstance(domain.make(folder), Environment)
    assert isinstance(load_domain("search", {"results": 2}), SearchDomain)


def test_split_names_are_disjoint_and_share_all_syllables() -> None:
    names = {split: names_of(split) for split in SPLITS}
    assert {split: len(set(names[split])) for split in SPLITS} == {"train": 800, "valid": 160, "test": 640}
    assert not set(names["train"]) & set(names["test"])
    for split in SPLITS:
        assert {name[:3] for name in names[split]} == set(FIRST)
        assert {name[3:] for name in names[split]} == set(SECOND)
    assert split_of("Xyzbas") is None


def test_world_uses_names_of_its_split_and_one_value_per_fact() -> None:
    for number in range(20):
        world = make_world("test", number)
        assert 40 <= len(world.pages) <= 60
        names = {page.name for page in world.pages} | {value for page in world.pages for _, value in page.facts}
        assert {split_of(name) for name in names} == {"test"}
        assert len(world.facts) == sum(len(page.facts) for page in world.pages)
        assert len({page.title for page in world.pages}) == len(world.pages)
        assert max(Counter(page.name for page in world.pages).values()) == 2
        assert World.from_json(world.to_json()) == world
    assert make_world("test", 1) == make_world("test", 1) != make_world("test", 2)


def test_query_by_name_and_relation_ranks_the_page_first() -> None:
    """An expert's query must never rank a distractor above the fact's own page."""
    for number in range(10):
        world = make_world("train", number)
        index = SearchIndex(world.pages)
        for (name, relation), (page, _) in world.facts.items():
            assert index.search(f"{name} {relation}", 1) == [page]


def test_search_ranking_ties_and_misses() -> None:
    pages = (
        Page("Kelbas", "Hall", (("ally", "Dorvin"), ("heir", "Selmak"))),
        Page("Kelbas", "Guild", (("rival", "Dorvin"), ("envoy", "Selmak"))),
        Page("Dorvin", "Court", (("ally", "Kelbas"), ("heir", "Selmak"))),
    )
    index = SearchIndex(pages)
    assert index.search("Kelbas", 3) == list(pages)
    assert index.search("KELBAS rival!", 1) == [pages[1]]
    assert index.search("dorvin", 1) == [pages[2]]
    assert index.search("nothing here", 3) == []
    assert index.search("?!", 3) == []


def test_expert_solves_every_task_with_one_search_per_hop(domain: SearchDomain, folder: Path, tasks: list[Task]) -> None:
    environment = domain.make(folder)
    for task in tasks:
        assert play_expert(domain, environment, task) == (1.0, int(task.difficulty) + 1)
        assert domain.expert(environment) is None


def test_every_hop_is_needed(tasks: list[Task]) -> None:
    """No page of an earlier hop states the answer, and no name occurs twice in the chain."""
    for task in tasks:
        world = make_world(task.split, task.seed)
        chain, answer = task.spec["chain"], task.spec["answer"]
        earlier = {hop["name"] for hop in chain[:-1]}
        assert answer not in {value for page in world.pages if page.name in earlier for _, value in page.facts}
        assert len({task.spec["start"], *(hop["value"] for hop in chain)}) == len(chain) + 1
        assert answer not in task.prompt


def closed_book_success(tasks: list[Task]) -> dict[str, float]:
    """Exact match of answers without search: the best constant; the most frequent answer of the other tasks with the same
    relation; the name in the question."""
    by_relation: dict[str, Counter[str]] = defaultdict(Counter)
    for task in tasks:
        by_relation[task.spec["relations"][-1]][task.spec["answer"]] += 1
    hits = 0
    for task in tasks:
        answer = task.spec["answer"]
        others = by_relation[task.spec["relations"][-1]] - Counter([answer])
        hits += bool(others) and min(others, key=lambda name: (-others[name], name)) == answer
    return {
        "constant": max(Counter(task.spec["answer"] for task in tasks).values()) / len(tasks),
        "relation_majority": hits / len(tasks),
        "start": sum(task.spec["start"] == task.spec["answer"] for task in tasks) / len(tasks),
    }


def test_closed_book_success_is_under_5_percent(domain: SearchDomain, tmp_path: Path) -> None:
    """On the shipped test questions: memorised facts do not help."""
    lines = (ROOT / "data/raw/search.jsonl").read_text(encoding="utf-8").splitlines()
    test = [task for task in domain.build([json.loads(line) for line in lines], tmp_path, 1) if task.split == "test"]
    assert len(test) >= 200
    assert max(closed_book_success(test).values()) < 0.05


def test_shipped_records_equal_recipes(domain: SearchDomain) -> None:
    lines = (ROOT / "data/raw/search.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert records == list(domain.recipes(len(records), 0))
    counts = Counter(record["split"] for record in records)
    assert counts["train"] >= 192
    assert counts["valid"] >= 24
    assert counts["test"] >= 200
    for record in records:
        domain.check(record)


def test_recipes_keep_worlds_in_one_split_and_mix_hops(domain: SearchDomain) -> None:
    records = list(domain.recipes(416, 7))
    assert Counter(record["split"] for record in records) == {"train": 192, "valid": 24, "test": 200}
    assert len({record["world"] for record in records}) == len({(record["split"], record["world"]) for record in records}) == 52
    assert Counter(record["hops"] for record in records) == {1: 104, 2: 208, 3: 104}
    assert len({record["task_id"] for record in records}) == 416
    only_three = SearchDomain(SearchSettings(hops={3: 1.0})).recipes(8, 0)
    assert {record["hops"] for record in only_three} == {3}


def test_train_and_test_share_no_entities(domain: SearchDomain, tasks: list[Task]) -> None:
    train = set().union(*(domain.entities(task) for task in tasks if task.split == "train"))
    test = set().union(*(domain.entities(task) for task in tasks if task.split == "test"))
    assert train
    assert test
    assert not train & test


def test_reward_terms_by_hand(folder: Path, tasks: list[Task]) -> None:
    task = first_task(tasks, 2)
    answer = task.spec["answer"]
    for reward, given, expected in (
        ("exact_match", answer.upper() + ".", 1.0),
        ("exact_match", f"{answer} {answer[:3]}", 0.0),
        ("f1", f"{answer} perhaps", 2 / 3),
    ):
        environment = SearchDomain(SearchSettings(reward=reward)).make(folder)
        environment.reset(task)
        hop = task.spec["chain"][0]
        assert environment.step(f"search {hop['name']} {hop['relation']}").cost == 1.0
        step = environment.step(f"answer {given}")
        assert step.terminated
        assert not step.truncated
        assert step.reward == pytest.approx(expected)
        assert step.terms["evidence"] == 0.5
        assert step.terms[reward] == pytest.approx(expected)


def test_scoring_by_hand() -> None:
    assert exact_match("The  Kelmar!", "kelmar") == 1.0
    assert exact_match("", "kelmar") == 0.0
    assert token_f1("a b c", "b c d") == pytest.approx(2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3))  # "a" is an article
    assert token_f1("x", "y") == 0.0


def test_unknown_actions_only_advance_the_turn_counter(domain: SearchDomain, folder: Path, tasks: list[Task]) -> None:
    environment = domain.make(folder)
    environment.reset(tasks[0])
    key = environment.state_key()
    for action in ("", "open door", "search", "answer  "):
        step = environment.step(action)
        assert (step.accepted, step.observation.text, step.done) == (False, USAGE, False)
    step = environment.step("search zzz")
    assert (step.accepted, step.observation.text) == (True, NO_HIT)
    assert environment.state_key() == key
    assert environment.snapshot().turns == 5


def test_turn_limit_truncates_unless_last_turn_answers(folder: Path, tasks: list[Task]) -> None:
    environment = SearchDomain(SearchSettings(max_turns=2)).make(folder)
    environment.reset(tasks[0])
    environment.step("search zzz")
    before = environment.snapshot()
    step = environment.step("search zzz")
    assert (step.terminated, step.truncated, step.terms["exact_match"]) == (False, True, 0.0)
    assert environment.admissible() == []
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("search zzz")
    environment.restore(before)
    step = environment.step(f"answer {tasks[0].spec['answer']}")
    assert (step.terminated, step.truncated, step.reward) == (True, False, 1.0)
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("search zzz")


def test_restored_snapshot_continues_identically(domain: SearchDomain, folder: Path, tasks: list[Task]) -> None:
    task = first_task(tasks, 3)
    environment, other = domain.make(folder), domain.make(folder)
    environment.reset(task)
    environment.step(domain.expert(environment))
    state, key = environment.snapshot(), environment.state_key()
    first = [environment.step(action) for action in (domain.expert(environment), "search Kel", "answer Nobody")]
    other.reset(task)
    other.restore(state)
    assert other.state_key() == key
    second = [other.step(action) for action in (domain.expert(other), "search Kel", "answer Nobody")]
    assert first == second
    assert environment.state_key() == other.state_key() != key
    environment.reset(tasks[0])
    with pytest.raises(ValueError, match="can't be restored"):
        environment.restore(state)


def test_state_key_ignores_the_order_of_searches(domain: SearchDomain, folder: Path, tasks: list[Task]) -> None:
    task = first_task(tasks, 3)
    queries = [f"search {hop['name']} {hop['relation']}" for hop in task.spec["chain"]]
    keys = []
    for order in (queries, queries[::-1], [*queries, queries[0]]):
        environment = domain.make(folder)
        environment.reset(task)
        for query in order:
            environment.step(query)
        keys.append(environment.state_key())
    assert len(set(keys)) == 1


def test_results_setting_is_the_number_of_pages_shown(folder: Path, tasks: list[Task]) -> None:
    environment = SearchDomain(SearchSettings(results=3)).make(folder)
    environment.reset(tasks[0])
    pages = environment.step(f"search {tasks[0].spec['start']} {RELATIONS[0]}").observation.text.split("\n")
    assert len(pages) == 3
    assert len(environment.seen_pages()) == 3


def test_echo_query_appends_the_query(folder: Path, tasks: list[Task]) -> None:
    """Contract: the query is appended, also without a hit, and nothing else changes."""
    plain, echoing = (SearchDomain(SearchSettings(echo_query=echo)).make(folder) for echo in (False, True))
    task = first_task(tasks, 1)
    for query in (f"{task.spec['start']} {task.spec['relations'][0]}", "nothing"):
        seen = []
        for environment in (plain, echoing):
            environment.reset(task)
            seen.append(environment.step(f"search {query}").observation.text)
        assert seen[1] == f"{seen[0]} query: {query}"
    assert plain.state_key() == echoing.state_key()


def test_question_text() -> None:
    assert question("Kelmar", ["founder", "mentor"]) == "Who is the mentor of the founder of Kelmar?"


def test_instructions_setting_adds_instructions_to_the_prompt(tmp_path: Path) -> None:
    domain = SearchDomain(SearchSettings(instructions=True))
    task = domain.build(list(domain.recipes(1, 0)), tmp_path, 1)[0]
    assert "search <query>" in task.prompt
    assert task.prompt.endswith("?")


def test_build_writes_same_bytes(domain: SearchDomain, tmp_path: Path) -> None:
    records = list(domain.recipes(24, 5))
    built = [domain.build(records, tmp_path / name, 1) for name in "ab"]
    assert built[0] == built[1]
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]
    assert len(files[0]) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hops": 9}, "'hops' must be 1 to 3"),
        ({"world": "x"}, "'world' must be int"),
        ({"relations": ["ally", "cousin"], "hops": 2}, "cousin"),
        ({"start": "Kelmar"}, "not a name of"),
        ({"extra": 1}, "unknown keys"),
        ({"split": "dev"}, "'split' must be one of"),
    ],
)
def test_check_error_names_the_problem(domain: SearchDomain, change: dict, message: str) -> None:
    record = next(domain.recipes(1, 0))
    with pytest.raises(ValueError, match=message):
        domain.check({**record, **change})


def test_missing_fact_error_names_the_record(domain: SearchDomain, tmp_path: Path) -> None:
    record = next(domain.recipes(1, 0))
    stated = {relation for name, relation in make_world(record["split"], record["world"]).facts if name == record["start"]}
    missing = next(relation for relation in RELATIONS if relation not in stated)
    with pytest.raises(ValueError, match=f"record {record['task_id']}: its world has no '{missing}'"):
        domain.build([{**record, "hops": 1, "relations": [missing]}], tmp_path, 1)


def test_invalid_settings_and_file_errors_say_what_to_do(domain: SearchDomain, tmp_path: Path, tasks: list[Task]) -> None:
    with pytest.raises(ValueError, match="results"):
        load_domain("search", {"results": 0})
    with pytest.raises(ValueError, match="at least one weight"):
        load_domain("search", {"hops": {1: 0}})
    with pytest.raises(FileNotFoundError, match="run the curate stage"):
        domain.make(tmp_path).reset(tasks[0])
    (tmp_path / f"{tasks[0].spec['world']}.json").write_text("[{", encoding="utf-8")
    with pytest.raises(ValueError, match="run the curate stage"):
        SearchDomain().make(tmp_path).reset(tasks[0])
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).step("search x")
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).snapshot()


def test_closed_book_has_one_turn_and_no_tools(domain: SearchDomain, tasks: list[Task], folder: Path) -> None:
    """Contract: whatever the protocol, a search is refused and ends the episode; the reward is that of the answer. Panels with
    tools do not depend on the setting."""
    assert "closed_book" not in SearchSettings().model_dump()
    for settings in ({}, {"judge": {}, "max_turns": 12}, {"tool_mode": "self"}):
        closed = load_domain("search", {"closed_book": True, **settings}).make(folder)
        task = first_task(tasks, 2)
        assert closed.reset(task).text == "Answer from memory. Use: answer <name>."
        assert closed.admissible() == sorted({f"answer {task.spec['start']}", f"answer {task.spec['answer']}"})
        searched = closed.step(f"search {task.spec['start']}")
        assert (searched.accepted, searched.truncated, searched.reward, searched.cost) == (False, True, 0.0, 0.0)
        closed.reset(task)
        answered = closed.step(f"answer {task.spec['answer']}")
        assert (answered.terminated, answered.reward, answered.terms["evidence"]) == (True, 1.0, 0.0)
        assert play_expert(domain, closed, task) == (1.0, 1)
