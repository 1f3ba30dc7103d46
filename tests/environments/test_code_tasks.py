"""Tasks of the code domain: their tests, splits, known programs, prompts, settings and panel."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_games import hand_task, make

from stages.curation.cleaning import task_faults
from stages.curation.demonstrations import DemonstrationPlan, demonstrate
from stages.curation.panel import make_panel
from stages.curation.settings import Curate
from stages.environments.code import CodeDomain, CodeSettings
from stages.environments.code.families import families
from stages.environments.code.problems import known_programs, make_problem
from stages.environments.registry import load_domain
from stages.records.task import SPLITS, Task
from stages.sandbox import Sandbox

pytestmark = pytest.mark.long(4)


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return list(CodeDomain().recipes(104, 0))


@pytest.fixture(scope="module")
def tasks(records: list[dict]) -> list[Task]:
    domain = CodeDomain()
    return [domain.task(record, {}) for record in records]


def test_tests_of_a_task_expect_different_values(tasks: list[Task]) -> None:
    """Contract: a program that ignores its argument fails."""
    for task in tasks:
        expected = {test.rpartition(" == ")[2] for test in (*task.spec["shown"], *task.spec["hidden"])}
        assert len(expected) > 1, task.prompt


def test_same_recipe_gives_same_problem(records: list[dict], tasks: list[Task]) -> None:
    assert [CodeDomain().task(record, {}) for record in records[:20]] == tasks[:20]
    assert CodeDomain().task({**records[0], "seed": 1}, {}) != tasks[0]


def test_splits_share_no_entities(tasks: list[Task]) -> None:
    domain = CodeDomain()
    assert task_faults(tasks, domain, 640) == {}
    names = [set().union(*(domain.entities(task) for task in tasks if task.split == split)) for split in SPLITS]
    assert not names[0] & names[1]
    assert not names[2] & (names[0] | names[1])


def test_training_problem_with_a_test_solution_is_rejected(tasks: list[Task]) -> None:
    """Contract: renaming and other constants do not hide the overlap; another form of the program does, here a module instead of
    the returned expression."""
    tested = next(task for task in tasks if task.split == "test" and task.spec["family"].startswith("list"))
    solution = tested.spec["references"][0]["source"].replace("b", "item")
    copied = hand_task(
        references=[{"style": "given", "source": f"def f(xs):\n    # copied\n    return {solution}".replace("in a", "in xs")}]
    )
    renamed = hand_task(
        references=[{"style": "expression", "source": tested.spec["references"][0]["source"].replace("b", "item")}]
    )
    domain = CodeDomain()
    (reason, detail) = task_faults([tested, renamed], domain, 640)["hand"]
    assert reason == "split_overlap"
    assert tested.task_id in detail
    assert task_faults([tested, copied], domain, 640) == {}


def test_known_programs_have_the_stated_outcomes(sandbox: Sandbox, tasks: list[Task]) -> None:
    """Contract: in the sandbox, for each kind of task, solutions in every style pass and near misses have the outcome stated in
    the task."""
    _, environment = make(CodeSettings(), sandbox)
    kinds = {
        kind: next(task for task in tasks if task.spec["family"].startswith(kind))
        for kind in ("list", "number", "word", "choice")
    }
    for task in kinds.values():
        for source, outcome in known_programs(task.spec):
            environment.reset(task)
            step = environment.step(source)
            assert step.terms[outcome] == 1.0, (task.spec["family"], source, step)


def test_noisy_demonstrations_end_with_a_solution(sandbox: Sandbox, tasks: list[Task]) -> None:
    """Contract: with turns for repair, near misses in demonstrations are followed by a solution."""
    domain, environment = make(CodeSettings(max_turns=3, styles=("loop",)), sandbox)
    plan = DemonstrationPlan(Curate(noise=0.5), seed=0, max_length=640)
    episodes = [episode for task in tasks[:6] for episode in demonstrate(domain, environment, task, plan).episodes]
    assert all(episode.success for episode in episodes)
    assert any(len(episode.turns) > 1 for episode in episodes)
    for task in tasks[:6]:
        by_style = {one["style"]: one["source"] for one in task.spec["references"]}
        environment.reset(task)
        assert domain.expert(environment) in ([by_style["loop"]] if "loop" in by_style else by_style.values())


def test_prompt_omits_hidden_tests_and_may_start_with_instructions(records: list[dict]) -> None:
    record = next(record for record in records if record["family"].startswith("list"))
    task = CodeDomain().task(record, {})
    assert task.prompt.startswith(f"f(a): {task.spec['text']}; f(")
    for test in task.spec["hidden"]:
        assert test.removeprefix("assert ").split(" == ")[0] not in task.prompt
    prompt = CodeDomain(CodeSettings(instructions=True)).task(record, {}).prompt
    assert prompt.startswith("Answer with the Python function f(a) alone")
    assert prompt.endswith(task.prompt)


def test_signs_wording_changes_only_the_text(records: list[dict], tasks: list[Task]) -> None:
    signs = CodeDomain(CodeSettings(wording="signs"))
    for name, constants, text in (
        ("list:above:square:sum", [5, 4, 3], "sum of b*b for b>5"),
        ("list:all:plus:list", [5, 4, 3], "list of b+4"),
        ("number:times b:minus", [2, 3], "a, *b, -3"),
        ("word:reverse:first", [2, 3], "a, [::-1], [:3]"),
        ("choice:above:plus:itself", [5, 2, 3], "a>5, a+2, a"),
    ):
        assert make_problem(families()[name], constants, 0, 1, 3, signs=True).text == text
    for record, task in zip(records[:10], tasks, strict=False):
        written = signs.task(record, {})
        assert {**written.spec, "text": ""} == {**task.spec, "text": ""}
        assert written.prompt != task.prompt


def test_invalid_settings_and_record_errors_name_the_cause(records: list[dict]) -> None:
    for settings, message in (
        ({"levels": {4: 1.0}}, "levels"),
        ({"levels": {1: 0.0}}, "at least one weight above 0"),
        ({"kinds": []}, "kinds"),
        ({"rewards": {"pass": 0.5}}, "rewards.pass"),
        ({"rewards": {"fail": 1.0}}, "rewards.fail"),
        ({"sandbox": {"backend": "subprocess"}}, "unsafe_subprocess"),
        ({"styles": ["recursive"]}, "styles"),
    ):
        with pytest.raises(ValueError, match=message):
            load_domain("code", settings)
    domain, record = CodeDomain(), records[0]
    other = "test" if record["split"] == "train" else "train"
    for change, message in (
        ({"family": "list:none"}, "unknown family 'list:none'"),
        ({"constants": [1]}, "constants"),
        ({"split": other}, "belongs to split"),
        ({"extra": 1}, "extra"),
    ):
        with pytest.raises(ValueError, match=message):
            domain.check({**record, **change})
    with pytest.raises(ValueError, match="has no 800 tests that differ"):
        make_problem(families()["word:reverse"], [2], 0, 400, 400)


def test_panel_hash_covers_settings(records: list[dict], tasks: list[Task], tmp_path: Path) -> None:
    domain = CodeDomain()
    panel = make_panel(domain, tasks, tmp_path)
    assert panel.hash == make_panel(CodeDomain(), [domain.task(record, {}) for record in records], tmp_path).hash
    assert make_panel(CodeDomain(CodeSettings(max_turns=3)), tasks, tmp_path).hash != panel.hash
