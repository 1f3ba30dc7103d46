"""Search with a judgment of each result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.curation.demonstrations import play_out
from stages.environments.registry import load_domain
from stages.environments.search import SearchDomain, SearchSettings
from stages.environments.search.judged import (
    GO_ON,
    JUDGE_FIRST,
    SEARCH_AGAIN,
    JudgedSearchEnvironment,
    JudgeSettings,
    usefulness,
)
from stages.environments.search.world import Page
from stages.records.episode import EXPERT
from stages.records.task import Task

HALL = Page("Kelmar", "Hall", (("founder", "Dorvin"), ("rival", "Selat")))
ORDER = Page("Kelmar", "Order", (("heir", "Pomtar"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def domain() -> SearchDomain:
    made = load_domain("search", {"judge": {}, "max_turns": 12})
    assert isinstance(made, SearchDomain)
    return made


@pytest.fixture(scope="module")
def tasks(domain: SearchDomain, folder: Path) -> list[Task]:
    return domain.build(list(domain.recipes(104, 3)), folder, 1)


@pytest.fixture
def environment(domain: SearchDomain, folder: Path) -> JudgedSearchEnvironment:
    made = domain.make(folder)
    assert isinstance(made, JudgedSearchEnvironment)
    return made


def good_query(task: Task) -> str:
    hop = task.spec["chain"][0]
    return f"search {hop['name']} {hop['relation']}"


def test_usefulness_is_the_best_share_of_a_fact_on_a_page() -> None:
    fact = ("Kelmar", "founder", "Dorvin")
    assert usefulness([HALL], [fact]) == 1.0
    assert usefulness([ORDER], [fact]) == pytest.approx(1 / 3)
    assert usefulness([ORDER, HALL], [fact]) == 1.0
    assert usefulness([], [fact]) == 0.0


@pytest.mark.parametrize(("score", "name"), [(0.7, "judge_false_accept"), (0.7001, "judge_true_accept")])
def test_score_must_be_above_the_threshold(environment: Any, tasks: list[Task], score: float, name: str) -> None:
    environment.reset(tasks[0])
    environment.step(good_query(tasks[0]))
    environment._state = environment._state.__class__(**{**vars(environment._state), "score": score})
    assert environment.step("judge yes").terms == {name: 1.0}


def test_result_has_to_be_judged_and_a_rejection_followed_by_a_search(environment: Any, tasks: list[Task]) -> None:
    """Contract: what the protocol does not allow takes a turn, is not accepted and earns nothing."""
    task = tasks[0]
    environment.reset(task)
    assert not environment.step("judge yes").accepted, "nothing to judge"
    environment.step(good_query(task))
    for action in ("answer x", good_query(task), "judge maybe"):
        step = environment.step(action)
        assert (step.accepted, dict(step.terms), step.done) == (False, {}, False)
    assert environment.step("answer x").observation.text == JUDGE_FIRST
    step = environment.step("judge no")
    assert (step.accepted, dict(step.terms), step.observation.text) == (True, {"judge_false_reject": 1.0}, GO_ON[False])
    assert environment.step(f"answer {task.spec['answer']}").observation.text == SEARCH_AGAIN
    assert not environment.step("judge yes").accepted, "only the first judgment of a search counts"
    assert environment.step(good_query(task)).accepted
    assert environment.step("judge yes").terms == {"judge_true_accept": 1.0}
    last = environment.step(f"answer {task.spec['answer']}")
    assert (last.reward, last.terminated, last.terms["judge_true_accept"]) == (1.0, True, 0.0)


def test_expert_rejects_useless_results_and_solves_its_tasks(domain: SearchDomain, environment: Any, tasks: list[Task]) -> None:
    found: dict[str, float] = {}
    for task in tasks:
        environment.reset(task)
        while (action := domain.expert(environment)) is not None:
            assert action in environment.admissible()
            step = environment.step(action)
            for name, value in step.terms.items():
                found[name] = found.get(name, 0.0) + value
        assert step.reward == 1.0
    assert found["judge_true_reject"] > 10
    assert found["judge_false_accept"] == found["judge_false_reject"] == 0


def test_snapshots_and_state_keys_know_what_is_allowed_next(environment: Any, tasks: list[Task]) -> None:
    environment.reset(tasks[0])
    keys = [environment.state_key()]
    environment.step(good_query(tasks[0]))
    keys.append(environment.state_key())
    pending = environment.snapshot()
    environment.step("judge no")
    keys.append(environment.state_key())
    assert environment.admissible() == sorted(environment.admissible())
    assert not any(action.startswith("answer") for action in environment.admissible())
    environment.restore(pending)
    assert environment.admissible() == ["judge no", "judge yes"]
    environment.step("judge yes")
    keys.append(environment.state_key())
    assert len(set(keys)) == 4


def test_instructions_explain_judgments(tasks: list[Task], folder: Path) -> None:
    plain = load_domain("search", {"instructions": True})
    judged = load_domain("search", {"instructions": True, "judge": {}})
    record = next(iter(plain.recipes(8, 3)))
    prompts = [one.build([record], folder, 1)[0].prompt for one in (plain, judged)]
    assert "judge yes" not in prompts[0]
    assert "judge yes" in prompts[1]


def test_panels_without_judgments_do_not_depend_on_the_setting() -> None:
    assert "judge" not in SearchSettings().model_dump(mode="json")
    judged = SearchSettings(judge=JudgeSettings())
    assert judged.model_dump(mode="json")["judge"] == {"threshold": 0.7}
    assert SearchSettings.model_validate(judged.model_dump()) == judged


@pytest.mark.parametrize("threshold", [1.0, -0.1])
def test_threshold_is_a_share(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        JudgeSettings(threshold=threshold)


def test_a_judgment_in_the_last_turn_counts(folder: Path, tasks: list[Task]) -> None:
    made = load_domain("search", {"judge": {}, "max_turns": 2}).make(folder)
    made.reset(tasks[0])
    made.step(good_query(tasks[0]))
    last = made.step("judge yes")
    assert (last.truncated, last.terms["judge_true_accept"], last.terms["exact_match"]) == (True, 1.0, 0.0)


def test_a_rejected_result_is_hidden_with_context_hard(tasks: list[Task], folder: Path) -> None:
    """Contract: the step says how many steps ago the result was shown, refused actions between included, and it is as if the page
    had not been seen; an accepted one stays, and with context soft any."""
    hard = load_domain("search", {"judge": {"context": "hard"}, "max_turns": 12})
    soft = load_domain("search", {"judge": {}, "max_turns": 12})
    assert (hard.forgets(), soft.forgets(), load_domain("search").forgets()) == (True, False, False)
    assert hard.settings.model_dump()["judge"] == {"threshold": 0.7, "context": "hard"}
    for domain, forgets, shown in ((hard, 2, 0.0), (soft, 0, 1.0)):
        made = domain.make(folder)
        task = next(task for task in tasks if task.difficulty == 1)
        made.reset(task)
        made.step(good_query(task))
        made.step("jump")
        assert made.step("judge no").forgets == forgets
        assert made.next_action() == (good_query(task) if forgets else f"answer {task.spec['answer']}")
        made.step("search nothing of it")
        assert made.step("judge yes").forgets == 0
        assert made.step("answer x").terms["evidence"] == shown


def test_demonstrations_say_what_they_forget(tasks: list[Task], folder: Path) -> None:
    domain = load_domain("search", {"judge": {"context": "hard"}, "max_turns": 12})
    environment, rejections = domain.make(folder), 0
    for task in tasks[:24]:
        shown = play_out(environment, task, "expert-0", EXPERT, lambda: domain.expert(environment))
        assert shown is not None
        assert shown.success
        rejected = [place for place, turn in enumerate(shown.turns) if turn.action == "judge no"]
        assert shown.forgotten == [[place - 1, place] for place in rejected]
        rejections += len(rejected)
    assert rejections > 5


def test_constraints_whose_turns_have_several_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"judge\.context: hard counts steps"):
        load_domain("search", {"judge": {"context": "hard"}, "constraint": {"spec": "react"}})
