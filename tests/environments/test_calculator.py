"""The calculator domain: expressions, episodes, scoring, recipes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from stages.curation.__main__ import configured_domain
from stages.environments.calculator import CalculatorDomain, CalculatorSettings
from stages.environments.calculator.domain import SHARES, split_of
from stages.environments.calculator.environment import USAGE, CalculatorEnvironment
from stages.environments.calculator.expression import (
    Operation,
    canonical,
    needed,
    next_operation,
    operations,
    parse,
    simplify,
    trivial_result,
    value,
    write,
)
from stages.environments.calculator.scoring import digit_share, exact_match, normalize
from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.params import load_params
from stages.records.task import SPLITS, Task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def domain() -> CalculatorDomain:
    return CalculatorDomain()


@pytest.fixture(scope="module")
def tasks(domain: CalculatorDomain, tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    return domain.build(list(domain.recipes(104, 3)), tmp_path_factory.mktemp("worlds"), 1)


def item(domain: CalculatorDomain, expression: str) -> Task:
    record = {"task_id": "t", "split": "train", "expression": expression}
    domain.check(record)
    return domain.build([record], ROOT / "data", 1)[0]


def play_expert(domain: CalculatorDomain, environment: CalculatorEnvironment, task: Task) -> tuple[float, list[str]]:
    environment.reset(task)
    actions = []
    while True:
        action = domain.expert(environment)
        assert action in environment.admissible()
        actions.append(action)
        step = environment.step(action)
        if step.done:
            return step.reward, actions


def test_implements_domain_and_environment_protocols(domain: CalculatorDomain, tmp_path: Path) -> None:
    assert isinstance(domain, Domain)
    assert isinstance(domain.make(tmp_path), Environment)
    assert isinstance(load_domain("calculator", {"largest_operand": 9}), CalculatorDomain)


@pytest.mark.parametrize(
    ("text", "result", "steps"),
    [
        ("(47+38)*2-12", 158, ["47+38", "85*2", "170-12"]),
        ("2+3*4", 14, ["3*4", "2+12"]),
        ("90-(50-20)", 60, ["50-20", "90-30"]),
        ("90-50-20", 20, ["90-50", "40-20"]),
        ("47*1", 47, []),
        ("(3+4)*(3+4)", 49, ["3+4", "7*7"]),
        ("(9-9)*31+5", 5, []),
    ],
)
def test_expressions_by_hand(text: str, result: int, steps: list[str]) -> None:
    """Standard precedence and brackets; trivial operations need no tool."""
    expression = parse(text)
    assert write(expression) == text
    assert value(expression) == result
    assert needed(expression) == steps
    assert next_operation(simplify(expression, {})) == (steps[0] if steps else None)


def test_parse_and_write_are_inverse(domain: CalculatorDomain) -> None:
    for record in domain.recipes(416, 11):
        expression = parse(record["expression"])
        assert write(expression) == record["expression"]
        assert value(expression) == eval(record["expression"])  # safe: the recipes generated it


def test_canonical_ignores_only_the_order_of_terms() -> None:
    assert canonical(parse("2+3*4")) == canonical(parse("4*3+2"))
    assert canonical(parse("7-3")) != canonical(parse("3-7"))
    assert canonical(parse("(2+3)*4")) != canonical(parse("2+3*4"))


def test_trivial_results() -> None:
    for one, result in ((("+", 0, 7), 7), (("-", 7, 0), 7), (("-", 7, 7), 0), (("*", 1, 7), 7), (("*", 7, 0), 0)):
        assert trivial_result(*one) == result
    for one in (("+", 1, 7), ("-", 0, 7), ("-", 1, 7), ("*", 2, 7)):
        assert trivial_result(*one) is None


@pytest.mark.parametrize(
    "text", ["", "2**9", "2/3", "a+1", "1.5+2", "True+1", "__import__('os')", "(2+3", f"1+{10**18}", "1+" * 101 + "1"]
)
def test_parse_accepts_only_integers_and_three_operators(text: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        parse(text)


def test_expert_solves_every_task_and_uses_the_tool_only_if_needed(
    domain: CalculatorDomain, tasks: list[Task], tmp_path: Path
) -> None:
    environment = domain.make(tmp_path)
    for task in tasks:
        reward, actions = play_expert(domain, environment, task)
        assert reward == 1.0
        assert len(actions) == task.difficulty + 1
        assert domain.expert(environment) is None


def test_tool_is_optional(domain: CalculatorDomain, tmp_path: Path) -> None:
    """Hard tasks may be answered directly, and easy ones may be calculated."""
    environment = domain.make(tmp_path)
    for actions, cost in ((["answer 85"], 0.0), (["key 47+38", "answer 85"], 1.0), (["key 38 + 47", "answer 85"], 1.0)):
        environment.reset(item(domain, "47+38"))
        steps = [environment.step(action) for action in actions]
        assert steps[-1].reward == 1.0
        assert sum(step.cost for step in steps) == cost
    environment.reset(item(domain, "47*1"))
    assert environment.step("key 47*1").observation.text == "= 47"


def test_key_actions_by_hand(domain: CalculatorDomain, tmp_path: Path) -> None:
    environment = domain.make(tmp_path)
    environment.reset(item(domain, "47+38"))
    for text, shown in (("47+38", "= 85"), ("3-8", "= -5"), ("-5 * 4", "= -20"), ("3--5", "= 8"), ("7-(-2)", "= 9")):
        step = environment.step(f"key {text}")
        assert (step.observation.text, step.accepted, step.reward, step.done) == (
            shown,
            True,
            0.0,
            False,
        )


def test_reward_terms_by_hand(tmp_path: Path, domain: CalculatorDomain) -> None:
    task = item(domain, "(47+38)*2-12")
    for reward, given, expected in (
        ("exact_match", "0158.", 1.0),
        ("exact_match", "157", 0.0),
        ("digits", "157", 2 / 3),
        ("digits", "58", 2 / 3),
    ):
        environment = CalculatorDomain(CalculatorSettings(reward=reward)).make(tmp_path)
        environment.reset(task)
        environment.step("key 47+38")
        step = environment.step(f"answer {given}")
        assert (step.terminated, step.truncated) == (True, False)
        assert step.reward == pytest.approx(expected)
        assert step.terms[reward] == pytest.approx(expected)
        assert step.terms["worked"] == pytest.approx(1 / 3)


def test_progress_reward_counts_each_operation_once_and_sums_to_one(tmp_path: Path) -> None:
    domain = CalculatorDomain(CalculatorSettings(reward="progress"))
    environment = domain.make(tmp_path)
    for answer, last in (("158", 1 - 512 / 1024), ("157", 0.0)):
        environment.reset(item(domain, "(47+38)*2-12"))
        actions = ("key 47+38", "key 47+38", "key 85*2", "key 170-12", f"answer {answer}")
        rewards = [environment.step(action).reward for action in actions]
        assert rewards == [170 / 1024, 0.0, 171 / 1024, 171 / 1024, last]
    environment.reset(item(domain, "47+0"))
    assert environment.step("answer 47").reward == 1.0


def test_scoring_by_hand() -> None:
    assert normalize(" +1,024. ") == "1024"
    assert exact_match("085", "85") == 1.0
    assert exact_match("eighty-five", "85") == exact_match("", "85") == 0.0
    assert digit_share("158", "158") == 1.0
    assert digit_share("1158", "158") == 0.75
    assert digit_share("-158", "158") == 0.75
    assert digit_share("851", "158") == pytest.approx(1 / 3)
    assert digit_share("many", "158") == 0.0


def test_unknown_actions_only_advance_the_turn_counter(domain: CalculatorDomain, tasks: list[Task], tmp_path: Path) -> None:
    environment = domain.make(tmp_path)
    environment.reset(tasks[0])
    key = environment.state_key()
    for action in ("", "open door", "key", "key 2+3+4", f"key 1+{10**20}"):
        step = environment.step(action)
        assert (step.accepted, step.observation.text, step.done) == (False, USAGE, False)
    assert environment.state_key() == key
    assert environment.snapshot().turns == 5


def test_turn_limit_truncates_unless_last_turn_answers(tasks: list[Task], tmp_path: Path) -> None:
    environment = CalculatorDomain(CalculatorSettings(max_turns=2)).make(tmp_path)
    environment.reset(tasks[0])
    environment.step("key 2+2")
    before = environment.snapshot()
    step = environment.step("key 2+2")
    assert (step.terminated, step.truncated, step.terms["exact_match"]) == (False, True, 0.0)
    assert environment.admissible() == []
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("key 2+2")
    environment.restore(before)
    step = environment.step(f"answer {tasks[0].spec['answer']}")
    assert (step.terminated, step.truncated, step.reward) == (True, False, 1.0)


def test_restored_snapshot_continues_identically(domain: CalculatorDomain, tasks: list[Task], tmp_path: Path) -> None:
    task = next(task for task in tasks if task.difficulty == 3)
    environment, other = domain.make(tmp_path), domain.make(tmp_path)
    environment.reset(task)
    environment.step(domain.expert(environment))
    state, key = environment.snapshot(), environment.state_key()
    first = [environment.step(action) for action in (domain.expert(environment), "key 2+2", "answer 7")]
    other.reset(task)
    other.restore(state)
    assert other.state_key() == key
    second = [other.step(action) for action in (domain.expert(other), "key 2+2", "answer 7")]
    assert first == second
    assert environment.state_key() == other.state_key() != key
    environment.reset(tasks[0])
    with pytest.raises(ValueError, match="can't be restored"):
        environment.restore(state)


def test_state_key_ignores_order_and_repetition(domain: CalculatorDomain, tmp_path: Path) -> None:
    keys = set()
    for order in (["2+3", "4*5"], ["4*5", "2+3"], ["2+3", "4*5", "2+3"]):
        environment = domain.make(tmp_path)
        environment.reset(item(domain, "2+3+4*5"))
        for operation in order:
            environment.step(f"key {operation}")
        keys.add(environment.state_key())
    assert len(keys) == 1


def test_recipes_mix_operations_and_separate_splits(domain: CalculatorDomain) -> None:
    records = list(domain.recipes(520, 7))
    assert Counter(record["split"] for record in records) == {"train": 240, "valid": 30, "test": 250}
    assert Counter(domain.record_difficulty(record) for record in records) == {0: 104, 1: 104, 2: 208, 3: 104}
    assert len({record["task_id"] for record in records}) == len({canonical(parse(r["expression"])) for r in records}) == 520
    assert all(split_of(parse(record["expression"])) == record["split"] for record in records)
    for record in records:
        results = [value(Operation(*one)) for one in operations(parse(record["expression"]))]
        assert all(2 <= result <= 999 for result in results), record


def test_recipes_follow_settings() -> None:
    settings = CalculatorSettings(operations={2: 1.0, 0: 0.0}, operators=["+"], largest_operand=9, largest_result=20)
    domain = CalculatorDomain(settings)
    for record in domain.recipes(52, 0):
        assert set(record["expression"]) <= set("0123456789+()")
        assert value(parse(record["expression"])) <= 20
        assert domain.record_difficulty(record) == 2
    assert domain.recipe_kinds() == {"operations 2"}


def test_exhausted_recipes_error_names_the_setting() -> None:
    domain = CalculatorDomain(CalculatorSettings(operations={0: 1.0}, operators=["-"], largest_operand=9))
    with pytest.raises(ValueError, match=r"no more different .*largest_operand"):
        list(domain.recipes(52, 0))


def test_split_sizes_follow_shares() -> None:
    counts = Counter(split_of(Operation("+", a, b)) for a in range(2, 100) for b in range(a, 100))
    total = sum(counts.values())
    for split, share in SHARES.items():
        assert counts[split] / total == pytest.approx(share / 52, abs=0.02)


def test_train_and_test_share_no_entities(domain: CalculatorDomain, tasks: list[Task]) -> None:
    train, test = (set().union(*(domain.entities(task) for task in tasks if task.split == name)) for name in ("train", "test"))
    assert train
    assert test
    assert not train & test


def test_constant_answer_succeeds_in_under_5_percent(domain: CalculatorDomain, tmp_path: Path) -> None:
    """Guessing does not pay: the bound holds for the best constant answer to the shipped test items."""
    lines = (ROOT / "data/raw/calculator.jsonl").read_text(encoding="utf-8").splitlines()
    test = [task for task in domain.build([json.loads(line) for line in lines], tmp_path, 1) if task.split == "test"]
    assert len(test) >= 200
    assert max(Counter(task.spec["answer"] for task in test).values()) / len(test) < 0.05


def test_shipped_records_equal_recipes() -> None:
    domain = configured_domain("calculator", load_params(ROOT / "params.yaml"))
    lines = (ROOT / "data/raw/calculator.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert records == list(domain.recipes(len(records), 0))
    counts = Counter(record["split"] for record in records)
    assert all(counts[split] >= wanted for split, wanted in zip(SPLITS, (192, 24, 200), strict=True))
    for record in records:
        domain.check(record)


def test_show_rest_displays_the_remaining_expression(tmp_path: Path) -> None:
    """The result of an operation of the task is shown within the remaining expression, that of any other operation alone."""
    domain = CalculatorDomain(CalculatorSettings(show_rest=True))
    environment = domain.make(tmp_path)
    environment.reset(item(domain, "47+38-12-0"))
    shown = [environment.step(f"key {text}").observation.text for text in ("38-12", "47+38", "85-12")]
    assert shown == ["= 26", "= 85-12-0", "= 73"]
    assert environment.step("answer 73").reward == 1.0


def test_brackets_and_smallest_settings() -> None:
    domain = CalculatorDomain(CalculatorSettings(brackets=False, smallest=10, largest_result=99, operators=["+", "-"]))
    for record in domain.recipes(104, 0):
        assert "(" not in record["expression"]
        numbers = [value(Operation(*one)) for one in operations(parse(record["expression"]))]
        assert all(10 <= number <= 99 for number in numbers), record


def test_tokenizer_splits_numbers_into_pairs_of_digits(tasks: list[Task]) -> None:
    """Numbers have the same tokens wherever they occur, so that they can be copied from the prompt; no text is unknown to the
    tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/base")
    for text in (*[task.prompt for task in tasks], "key 47+38", "answer 158", "= 158"):
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens).strip() == text
        digits = [piece for piece in tokenizer.convert_ids_to_tokens(tokens) if piece.strip("Ġ").isdigit()]
        assert "".join(digits) == "".join(character for character in text if character.isdigit())
        assert all(len(piece) <= 2 for piece in digits)


def test_instructions_setting_adds_instructions_to_the_prompt(tmp_path: Path) -> None:
    domain = CalculatorDomain(CalculatorSettings(instructions=True))
    task = domain.build(list(domain.recipes(1, 0)), tmp_path, 1)[0]
    assert "key <number>" in task.prompt
    assert task.prompt.endswith("?")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expression": "7"}, "1 to 5 operations"),
        ({"expression": "1+1+1+1+1+1+1"}, "1 to 5 operations"),
        ({"expression": "2^3"}, "whole numbers"),
        ({"expression": 5}, "'expression' must be str"),
        ({"extra": 1}, "unknown keys"),
        ({"split": "dev"}, "'split' must be one of"),
        ({"task_id": ""}, "'task_id' is empty"),
    ],
)
def test_check_error_names_the_problem(domain: CalculatorDomain, change: dict, message: str) -> None:
    record = next(domain.recipes(1, 0))
    with pytest.raises(ValueError, match=message):
        domain.check({**record, **change})


def test_invalid_settings_and_misuse_errors_name_the_cause(domain: CalculatorDomain, tmp_path: Path) -> None:
    for settings, message in (
        ({"largest_operand": 1}, "largest_operand"),
        ({"operations": {1: 0}}, "at least one weight"),
        ({"operations": {9: 1}}, "operations"),
        ({"operators": ["/"]}, "operators"),
        ({"largest_operand": 99, "largest_result": 50}, "is below largest_operand"),
        ({"largest_operand": 99, "smallest": 100, "largest_result": 999}, "is below smallest"),
    ):
        with pytest.raises(ValueError, match=message):
            load_domain("calculator", settings)
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).step("key 2+2")
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).snapshot()


def test_answers_are_equal_as_numbers(domain: CalculatorDomain) -> None:
    stated = [domain.answer(f"answer {text}") for text in ("-5", "5", "1.5", "15", "007", "7.", "1,000")]
    assert stated == ["-5", "5", "1.5", "15", "7", "7", "1000"]
    assert (domain.answer("calculate 1 + 1"), domain.answer("answer ")) == (None, None)
