"""Search that routes sub-questions to a pool of priced tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.environments.check import check
from stages.environments.pool import Member
from stages.environments.registry import load_domain
from stages.environments.search import SearchDomain
from stages.environments.search.environment import SearchEnvironment
from stages.environments.search.index import SearchIndex
from stages.environments.search.routed import RoutedSearchEnvironment, shard
from stages.environments.search.world import make_world
from stages.records.task import Task
from stages.records.tools import calls_by_tool

A, B = ["ally", "envoy", "founder", "heir", "keeper"], ["master", "mentor", "patron", "rival", "warden"]
POOL = [
    {"name": "small", "price": 1.0, "retriever": {"relations": A, "wrong": 0.2}},
    {"name": "mid", "price": 3.0, "retriever": {"relations": B}},
    {"name": "large", "price": 10.0},
    {"name": "extra", "price": 0.5, "about": "everything, cheaply", "new": True},
]


def domain_with(**route: Any) -> SearchDomain:
    made = load_domain("search", {"max_turns": 24, "route": {"pool": POOL, **route}})
    assert isinstance(made, SearchDomain)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def domain() -> SearchDomain:
    return domain_with()


@pytest.fixture(scope="module")
def tasks(domain: SearchDomain, folder: Path) -> list[Task]:
    return domain.build(list(domain.recipes(104, 3)), folder, 1)


@pytest.fixture
def environment(domain: SearchDomain, folder: Path) -> RoutedSearchEnvironment:
    made = domain.make(folder)
    assert isinstance(made, RoutedSearchEnvironment)
    return made


def hop_of(task: Task, relations: list[str]) -> dict[str, str] | None:
    return next((hop for hop in task.spec["chain"] if hop["relation"] in relations), None)


def test_members_know_their_part_of_the_world() -> None:
    world = make_world("train", 0)
    small, mid, large = (Member.model_validate(one) for one in POOL[:3])
    facts = {
        name: {(page.name, *fact) for page in shard(world.pages, member, "w").pages for fact in page.facts}
        for name, member in (("small", small), ("mid", mid), ("large", large))
    }
    true = {(name, relation, value) for (name, relation), (_, value) in world.facts.items()}
    assert facts["large"] == true
    assert facts["mid"] == {fact for fact in true if fact[1] in B}
    known = {fact for fact in true if fact[1] in A}
    wrong = facts["small"] - known
    assert {fact[:2] for fact in facts["small"]} == {fact[:2] for fact in known}
    assert 0.1 < len(wrong) / len(known) < 0.3
    half = Member.model_validate({"name": "half", "price": 1.0, "retriever": {"reach": 0.5}})
    share = sum(len(page.facts) for page in shard(world.pages, half, "w").pages) / len(true)
    assert 0.35 < share < 0.65


def test_a_call_is_paid_for_and_named(environment: Any, tasks: list[Task]) -> None:
    task = next(task for task in tasks if hop_of(task, B))
    hop = hop_of(task, B)
    assert hop is not None
    environment.reset(task)
    step = environment.step(f"search mid: {hop['name']} {hop['relation']}")
    assert hop["value"] in step.observation.text
    assert step.cost == 3.0 * len(step.observation.text.split())
    new = {"extra": 0.0} if task.split == "test" else {}
    assert calls_by_tool(step.terms) == {"small": 0.0, "mid": 1.0, "large": 0.0, **new}
    assert environment.step("think of it").cost == 0.0
    for action, accepted in (("search Kelmar founder", False), ("search nobody: Kelmar founder", True), ("search mid:", False)):
        step = environment.step(action)
        assert (step.accepted, step.cost) == (accepted, 0.0)
    assert environment.step("search nobody: Kelmar founder").observation.text == "None"


def test_queries_are_repeated_after_replies_for_free(tasks: list[Task], folder: Path) -> None:
    """Contract: echo_query, which params.yaml sets, holds for members, too; what is repeated is neither paid for nor a reply."""
    echoing: Any = load_domain("search", {"echo_query": True, "route": {"pool": POOL}}).make(folder)
    silent: Any = load_domain("search", {"route": {"pool": POOL}}).make(folder)
    hop = tasks[0].spec["chain"][0]
    query = f"large: {hop['name']} {hop['relation']}"
    for one in (echoing, silent):
        one.reset(tasks[0])
    there, here = echoing.step(f"search {query}"), silent.step(f"search {query}")
    assert there.observation.text == f"{here.observation.text} query: {query}"
    assert there.cost == here.cost == 10.0 * len(here.observation.text.split())
    assert echoing.state_key() == silent.state_key()


def test_the_expert_solves_its_tasks_in_the_right_format(domain: SearchDomain, environment: Any, tasks: list[Task]) -> None:
    spent = 0.0
    for task in tasks:
        environment.reset(task)
        while (action := domain.expert(environment)) is not None:
            step = environment.step(action)
            spent += step.cost
        assert (step.reward, step.terms["well_formed"], step.terms["evidence"]) == (1.0, 1.0, 1.0)
    assert spent > 0


def test_format_and_success_are_told_apart(environment: Any, tasks: list[Task]) -> None:
    task = tasks[0]
    environment.reset(task)
    assert environment.step("look around").terms["well_formed"] == 0.0
    environment.step("think of it")
    step = environment.step(f"answer {task.spec['answer']}")
    assert (step.reward, step.terms["well_formed"]) == (1.0, 0.0)
    environment.reset(task)
    environment.step("think of it")
    assert environment.step("answer Nobody").terms["well_formed"] == 1.0


def test_a_call_in_the_last_turn_is_not_executed(tasks: list[Task], folder: Path) -> None:
    environment: Any = load_domain("search", {"max_turns": 2, "route": {"pool": POOL}}).make(folder)
    environment.reset(tasks[0])
    environment.step("think of it")
    step = environment.step("search large: Kelmar founder")
    assert (step.truncated, step.cost, step.observation.text, step.terms["well_formed"]) == (True, 0.0, "", 0.0)
    assert calls_by_tool(step.terms)["large"] == 0.0


def test_only_test_tasks_have_new_members(environment: Any, tasks: list[Task]) -> None:
    for split in ("train", "test"):
        task = next(task for task in tasks if task.split == split)
        environment.reset(task)
        assert ("extra: everything, cheaply." in task.prompt) == (split == "test")
        assert any("extra" in action for action in environment.admissible()) == (split == "test")
        hop = task.spec["chain"][0]
        step = environment.step(f"search extra: {hop['name']} {hop['relation']}")
        assert (step.observation.text == "None") == (split == "train")
        assert (step.cost > 0) == (split == "test")


def test_snapshots_and_state_keys_know_replies_and_thoughts(environment: Any, tasks: list[Task]) -> None:
    task = tasks[0]
    hop = task.spec["chain"][0]
    environment.reset(task)
    keys = [environment.state_key()]
    for action in ("think of it", f"search large: {hop['name']} {hop['relation']}", "think again"):
        environment.step(action)
        keys.append(environment.state_key())
    assert len(set(keys)) == 4
    saved = environment.snapshot()
    first = environment.step(f"answer {task.spec['answer']}")
    environment.restore(saved)
    assert environment.step(f"answer {task.spec['answer']}") == first


def test_contract_of_environments_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m stages.environments check search`, with a pool."""
    from stages.environments import check as module
    from stages.runtime.checking import Findings

    monkeypatch.setattr(module, "load_domain", lambda name: domain_with())
    monkeypatch.setattr(module, "_in_worker", lambda *_: None)
    found = Findings()
    check("search", found)
    assert found.mistakes == []


def test_free_pool_of_one_finds_what_plain_search_finds(tasks: list[Task], folder: Path) -> None:
    """The limit: one free member that knows everything is search, apart from the prompt and the name in the query."""
    settings = {"pool": [{"name": "all", "price": 0.0}], "think": False, "describe": False}
    routed: Any = load_domain("search", {"route": settings}).make(folder)
    plain: Any = load_domain("search", {}).make(folder)
    assert type(plain) is SearchEnvironment
    for task in tasks[:8]:
        hop = task.spec["chain"][0]
        query = f"{hop['name']} {hop['relation']}"
        for one in (routed, plain):
            one.reset(task)
        there, here = routed.step(f"search all: {query}"), plain.step(f"search {query}")
        assert there.observation == here.observation
        assert (there.cost, here.cost) == (0.0, 1.0)
        last = [one.step(f"answer {task.spec['answer']}") for one in (routed, plain)]
        assert last[0].reward == last[1].reward
        assert last[0].terms["well_formed"] == 1.0


def test_prompts_describe_the_pool_and_explain_actions(tasks: list[Task], tmp_path: Path) -> None:
    assert tasks[0].prompt.splitlines()[:2] == [f"small: {', '.join(A)}.", f"mid: {', '.join(B)}."]
    silent = load_domain("search", {"instructions": True, "route": {"pool": POOL, "describe": False, "think": False}})
    (task,) = silent.build([next(iter(silent.recipes(8, 3)))], tmp_path, 1)
    assert task.prompt.startswith("Each turn, write one action: search <source>: <question> or answer <name>.\nWho is")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"route": {"pool": []}}, "pool"),
        ({"route": {"pool": [POOL[0], POOL[0]]}}, "twice"),
        ({"route": {"pool": [POOL[3]]}}, "only new members"),
        ({"route": {"pool": [{"name": "a", "price": 1.0, "retriever": {"relations": ["king"]}}]}}, "king"),
        ({"route": {"pool": POOL}, "judge": {}}, "2 protocols"),
        ({"route": {"pool": POOL}, "results": 3}, "results is 3, and each member of route.pool has its own"),
    ],
)
def test_bad_pools_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_domain("search", settings)


def test_index_of_a_member_without_facts_is_empty() -> None:
    world = make_world("train", 0)
    nobody = Member.model_validate({"name": "n", "price": 1.0, "retriever": {"relations": []}})
    index = shard(world.pages, nobody, "w")
    assert isinstance(index, SearchIndex)
    assert index.search(f"{world.pages[0].name} founder", 1) == []
