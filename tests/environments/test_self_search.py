"""Search whose results the policy writes itself, the tool does, or either by the policy's uncertainty."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stages.claims.tuning import VALID
from stages.environments.protocol import tell_logprobs
from stages.environments.registry import load_domain
from stages.environments.search import SearchDomain
from stages.environments.search.known import Known, known_world
from stages.environments.search.self_search import ASK, SelfSearchEnvironment, uncertainty
from stages.records.task import Task

SETTINGS: dict[str, Any] = {"echo_query": True, "known": {"worlds": 1}, "hops": {1: 1, 2: 2}, "max_turns": 16}


def domain_in(mode: str, **changes: Any) -> SearchDomain:
    made = load_domain("search", {**SETTINGS, "tool_mode": mode, **changes})
    assert isinstance(made, SearchDomain)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> list[Task]:
    domain = domain_in("self")
    records = list(domain.recipes(260, 1))
    for record in records:
        domain.check(record)
    return domain.build(records, folder, 1)


def environment(mode: str, folder: Path, **changes: Any) -> SelfSearchEnvironment:
    made = domain_in(mode, **changes).make(folder)
    assert isinstance(made, SelfSearchEnvironment)
    return made


def two_hops(tasks: list[Task]) -> Task:
    return next(task for task in tasks if task.split == "train" and len(task.spec["chain"]) == 2)


def query(task: Task, hop: int = 0) -> str:
    return f"search {task.spec['chain'][hop]['name']} {task.spec['chain'][hop]['relation']}"


def test_modes_show_results_in_one_place_and_layout(tasks: list[Task], folder: Path) -> None:
    """Contract: what follows a result does not depend on who wrote it."""
    task = two_hops(tasks)
    real, own = environment("real", folder), environment("self", folder)
    real.reset(task)
    own.reset(task)
    told = real.step(query(task))
    assert (told.terms["real_search"], told.cost, told.evidence) == (1.0, 1.0, False)
    asked = own.step(query(task))
    assert (asked.observation.text, asked.cost, asked.evidence) == (ASK, 0.0, False)
    written = own.step(told.observation.text.partition(" query:")[0])
    assert written.observation == told.observation
    assert (written.evidence, written.terms["self_written"], written.terms["false_evidence"]) == (True, 1.0, 0.0)
    assert own.seen_pages() == real.seen_pages()


def test_a_false_result_is_shown_counted_and_nothing_else(tasks: list[Task], folder: Path) -> None:
    task = two_hops(tasks)
    own = environment("self", folder)
    own.reset(task)
    own.step("think of it")
    own.step(query(task))
    step = own.step("answer Selat")
    assert (step.done, step.evidence, step.terms["false_evidence"], step.reward) == (False, True, 1.0, 0.0)
    assert step.observation.text.startswith("answer Selat query:")
    own.step("think again")
    last = own.step(f"answer {task.spec['answer']}")
    assert (last.reward, last.terms["format_graded"], last.terms["evidence"]) == (1.0, 1.0, 0.0)


def test_every_mode_grades_the_format(tasks: list[Task], folder: Path) -> None:
    task = two_hops(tasks)
    for mode in ("self", "real"):
        for actions, expected in ((("think x", "answer y"), 0.5), (("jump", "think x", "answer y"), 0.0), (("answer y",), 0.0)):
            one = environment(mode, folder)
            one.reset(task)
            for action in actions:
                step = one.step(action)
            assert step.terms["format_graded"] == expected
    free = environment("real", folder, think=False)
    free.reset(task)
    assert not free.step("think x").accepted


def test_without_searches_questions_are_answered_directly(tasks: list[Task], folder: Path) -> None:
    domain, direct, task = domain_in("none"), environment("none", folder), two_hops(tasks)
    direct.reset(task)
    assert not direct.step(query(task)).accepted
    direct.reset(task)
    actions = [domain.expert(direct)]
    direct.step(str(actions[0]))
    assert not any(action.startswith("search") for action in direct.admissible())
    actions.append(domain.expert(direct))
    answer = task.spec["answer"]
    assert actions == [f"think {answer}", f"answer {answer}"]
    assert direct.step(f"answer {answer}").terms["format_graded"] == 0.5


def test_instructions_name_the_actions_of_a_mode(tmp_path: Path) -> None:
    def prompt(mode: str, **changes: Any) -> str:
        domain = domain_in(mode, instructions=True, **changes)
        return domain.build([next(iter(domain.recipes(8, 3)))], tmp_path, 1)[0].prompt

    assert prompt("self").startswith("Each turn, write one action: think <why> or search <query> or answer <name>.\nWhen asked")
    assert prompt("none", think=False).startswith("Each turn, write one action: answer <name>.\nWho")
    assert "When asked" not in prompt("real")


def logprobs_of(u: float) -> list[float]:
    """Of one token with -p log2 p = u, p below 1/e."""
    low, high = 1e-9, 1 / math.e
    for _ in range(200):
        p = (low + high) / 2
        low, high = (p, high) if -p * math.log2(p) < u else (low, p)
    return [math.log(low)]


def test_gate_asks_the_tool_where_a_query_is_less_certain_than_the_one_before(tasks: list[Task], folder: Path) -> None:
    """u = 0.20, 0.10, 0.15: real, self, real."""
    gated = environment("entropy_gated", folder)
    gated.reset(two_hops(tasks))
    found = []
    for u in (0.20, 0.10, 0.15):
        assert uncertainty(logprobs_of(u)) == pytest.approx(u)
        tell_logprobs(gated, logprobs_of(u))
        step = gated.step(query(two_hops(tasks)))
        found.append("real" if step.terms["real_search"] else "self")
        if found[-1] == "self":
            gated.step("a result")
    assert found == ["real", "self", "real"]


def test_uncertainty_is_the_mean_over_the_drawn_tokens() -> None:
    """Probabilities 1/2 and 1/4: (0.5 + 0.5) / 2; a certain token adds 0."""
    assert uncertainty([math.log(0.5), math.log(0.25)]) == pytest.approx(0.5)
    assert uncertainty([math.log(0.5), 0.0]) == pytest.approx(0.25)
    assert uncertainty([]) == 0.0


def test_snapshots_know_what_has_to_be_written_and_how_sure_the_last_query_was(tasks: list[Task], folder: Path) -> None:
    gated, task = environment("entropy_gated", folder), two_hops(tasks)
    gated.reset(task)
    keys = [gated.state_key()]
    tell_logprobs(gated, logprobs_of(0.2))
    gated.step(query(task))
    keys.append(gated.state_key())
    saved = gated.snapshot()
    for u, real in ((0.1, 0.0), (0.3, 1.0)):
        gated.restore(saved)
        tell_logprobs(gated, logprobs_of(u))
        step = gated.step(query(task, 1))
        assert step.terms["real_search"] == real
        keys.append(gated.state_key())
    assert len(set(keys)) == 4


def test_a_search_in_the_last_turn_has_no_result(tasks: list[Task], folder: Path) -> None:
    own = environment("self", folder, max_turns=2)
    own.reset(two_hops(tasks))
    own.step("think x")
    step = own.step(query(two_hops(tasks)))
    assert (step.truncated, step.observation.text, step.terms["format_graded"]) == (True, "", 0.0)
    own.reset(two_hops(tasks))
    own.step(query(two_hops(tasks)))
    step = own.step("a result")
    assert (step.truncated, step.evidence, step.terms["exact_match"]) == (True, True, 0.0)


def test_demonstrations_show_what_may_be_known_and_nothing_withheld(tasks: list[Task], folder: Path) -> None:
    domain, own = domain_in("self"), environment("self", folder)
    known = domain.settings.known
    assert known is not None
    solved = {"train": 0, "withheld": 0}
    for task in tasks:
        hidden = any(known.withholds(hop["page"]) for hop in task.spec["chain"])
        assert task.split == "test" or not hidden
        own.reset(task)
        while (action := domain.expert(own)) is not None:
            assert action in own.admissible() or own.snapshot().pending == ""
            step = own.step(action)
        if hidden:
            assert not step.done
            solved["withheld"] += 1
        else:
            assert (step.reward, step.terms["format_graded"]) == (1.0, 1.0)
            solved["train"] += task.split == "train"
    assert min(solved.values()) > 10


def test_splits_ask_different_questions_about_the_same_pages(tasks: list[Task]) -> None:
    domain = domain_in("self")
    asked = {split: {frozenset(domain.entities(task)) for task in tasks if task.split == split} for split in ("train", "test")}
    assert not asked["train"] & asked["test"]
    assert {task.spec["world"] for task in tasks} == {"known-000000"}
    titles = {hop["page"] for task in tasks if task.split == "test" for hop in task.spec["chain"]}
    shown = {hop["page"] for task in tasks if task.split == "train" for hop in task.spec["chain"]}
    known = Known(worlds=1)
    needed = {title for title in titles if not known.withholds(title)}
    assert len(needed & shown) > 0.9 * len(needed), "pages that may be known are demonstrated"


@pytest.mark.parametrize("kind", ["any", "known"])
def test_two_encyclopaedias_suffice_for_training_choosing_and_the_panel(kind: str) -> None:
    """Contract: settings are chosen on 96 validation tasks, which the shipped profile's worlds must have."""
    domain = domain_in("self", known={"worlds": 2, "withheld": 0.2, "test": kind})
    found = Counter(record["split"] for record in domain.recipes(20_000, 1))
    assert found["train"] >= 384
    assert found["valid"] >= VALID
    assert found["test"] >= 200


@pytest.mark.parametrize(("kind", "hidden"), [("known", {False}), ("withheld", {True}), ("any", {False, True})])
def test_test_questions_can_be_about_known_or_withheld_pages_alone(kind: str, hidden: set[bool]) -> None:
    domain = domain_in("self", known={"worlds": 1, "test": kind})
    world = known_world(0)
    known = Known(worlds=1)
    records = [record for record in domain.recipes(160, 1) if record["split"] == "test"]
    chains = [world.chain(record["start"], record["relations"]) for record in records]
    assert {any(known.withholds(hop.page) for hop in chain) for chain in chains} == hidden


def test_shipped_records_are_refused_with_known_worlds() -> None:
    plain = load_domain("search", {})
    record = next(iter(plain.recipes(8, 3)))
    with pytest.raises(ValueError, match=r"curate: \{seeds: \{train: 1, valid: 1, test: 1\}\}"):
        domain_in("self").check(record)
    mine = next(iter(domain_in("self").recipes(8, 3)))
    for changed, message in (({"world": 5}, "1 known worlds"), ({"split": "valid"}, "belongs to another")):
        with pytest.raises(ValueError, match=message):
            domain_in("self").check({**mine, **changed})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tool_mode": "sometimes"}, "tool_mode"),
        ({"tool_mode": "self", "judge": {}}, "2 protocols of search"),
        ({"tool_mode": "self", "results": 3}, "set results to 1"),
        ({"think": False}, "think has an effect with tool_mode only"),
        ({"known": {"withheld": 1.5}}, "withheld"),
        ({"target_thinks": 1}, "have an effect with tool_mode only"),
        ({"first_always_real": False}, "have an effect with tool_mode only"),
        ({"tool_mode": "self", "target_thinks": 9}, "target_thinks is 9, above max_thinks 8"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_domain("search", settings)


def test_plain_search_keeps_its_settings_hash() -> None:
    """Contract: the hash of a panel without tool modes does not depend on them."""
    kept = set(load_domain("search", {}).settings.model_dump())
    new = {"tool_mode", "think", "known", "route", "judge", "closed_book", "target_thinks", "max_thinks", "first_always_real"}
    assert not kept & new
    assert set(domain_in("real").settings.model_dump()) - kept == {"tool_mode", "known"}


def test_the_first_search_may_be_the_policys_own_and_thoughts_have_other_limits(tasks: list[Task], folder: Path) -> None:
    """first_always_real false, u = 0.20, 0.10, 0.15: self, self, real. One thought is enough with target_thinks 1; three are too
    many with max_thinks 2."""
    gated = environment("entropy_gated", folder, first_always_real=False)
    gated.reset(two_hops(tasks))
    found = []
    for u in (0.20, 0.10, 0.15):
        tell_logprobs(gated, logprobs_of(u))
        found.append(gated.step(query(two_hops(tasks))).terms["real_search"])
        if not found[-1]:
            gated.step("a result")
    assert found == [0.0, 0.0, 1.0]
    for changes, thoughts, expected in (
        ({"target_thinks": 1}, 1, 1.0),
        ({}, 1, 0.5),
        ({"max_thinks": 2}, 3, 0.0),
        ({}, 3, 1 / 3),
    ):
        one = environment("real", folder, **changes)
        one.reset(two_hops(tasks))
        for _ in range(thoughts):
            one.step("think x")
        assert one.step("answer y").terms["format_graded"] == pytest.approx(expected)
