"""The code domain: families, solutions and near misses, contamination, rewards, repair."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from stages.curation.__main__ import configured_domain
from stages.curation.cleaning import task_faults
from stages.curation.demonstrations import DemonstrationPlan, demonstrate
from stages.curation.panel import make_panel
from stages.curation.settings import Curate
from stages.environments.code import CodeDomain, CodeSettings
from stages.environments.code.behaviour import behaviour
from stages.environments.code.environment import Judge, unfenced
from stages.environments.code.families import Family, families
from stages.environments.code.fingerprint import canonical, fingerprint, phrases
from stages.environments.code.problems import Problem, compiled, evaluated, known_programs, make_problem
from stages.environments.code.settings import Rewards, Style
from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.params import load_params
from stages.records.task import SPLITS, Task
from stages.sandbox import Outcome, Program, Sandbox, TestResult, Tests

pytestmark = pytest.mark.long(20)
ROOT = Path(__file__).resolve().parents[2]
CODERL = Rewards(fail=-0.3, error=-0.6, compile_error=-1.0)


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return list(CodeDomain().recipes(104, 0))


@pytest.fixture(scope="module")
def tasks(records: list[dict]) -> list[Task]:
    domain = CodeDomain()
    return [domain.task(record, {}) for record in records]


def make(settings: CodeSettings, sandbox: Sandbox) -> tuple[CodeDomain, Environment]:
    """A domain whose programs run in `sandbox`, and its environment."""
    domain = CodeDomain(settings)
    domain.__dict__["_judge"] = Judge(sandbox)
    return domain, domain.make(Path())


def hand_task(**changes) -> Task:
    """The sum of the numbers above 3, with tests that catch most mistakes."""
    spec = {
        "family": "by hand",
        "text": "",
        "entry": "f",
        "parameters": ["a"],
        "context": "",
        "shown": ["assert f([4, 2]) == 4"],
        "hidden": ["assert f([3, 5]) == 5", "assert f([]) == 0"],
        "references": [{"style": "expression", "source": "sum(b for b in a if b>3)"}],
        "near_misses": [
            {"mistake": "boundary", "source": "sum(b for b in a if b>=3)", "outcome": "fail"},
            {"mistake": "bracket", "source": "sum(b for b in a if b>3", "outcome": "compile_error"},
        ],
    }
    return Task("hand", "code", "train", 0, "f(a): the sum of the numbers in a above 3", {**spec, **changes}, 2.0)


def drawn_problem(family: Family, rng: Random) -> Problem:
    """Retries, since some constants leave too few distinct tests."""
    for _ in range(50):
        with suppress(ValueError):
            return make_problem(family, family.constants(rng), 0, 2, 4)
    raise AssertionError(family.name)


# ---- families --------------------------------------------------------------------------------------------------------------


def test_training_families_cover_every_piece() -> None:
    pieces: dict[str, set[str]] = defaultdict(set)
    for family in families().values():
        pieces[family.split] |= {f"{family.kind} {piece.name}" for piece in family.pieces}
    assert pieces["train"] == set().union(*pieces.values())
    assert {family.level for family in families().values() if family.split == "test"} == {1, 2, 3}


def test_solutions_of_all_styles_pass_and_near_misses_cover_outcomes() -> None:
    """Contract: holds for every family; generated expressions run in this process, programs in the sandbox below."""
    rng, seen = Random(0), Counter()
    for family in families().values():
        problem = drawn_problem(family, rng)
        assert len(set(problem.shown + problem.hidden)) == 6
        assert not set(problem.shown) & set(problem.hidden)
        scope = {"f": None}
        for style, source in problem.references:
            seen[style] += 1
            body = "".join(f"    {line}\n" for line in (source if "return" in source else f"return {source}").splitlines())
            exec(f"def f({', '.join(problem.parameters)}):\n{body}", scope)
            for test in (*problem.shown, *problem.hidden):
                exec(test, scope)
        outcomes = Counter(outcome for _, _, outcome in problem.near_misses)
        assert outcomes["fail"] >= 1, family.name
        assert outcomes["error"] >= 1, family.name
        assert outcomes["compile_error"] >= 1, family.name
        seen.update(outcomes)
        assert len({source for _, source in problem.references}) >= 2, family.name
    assert set(seen) == {*get_args(Style), "fail", "error", "compile_error"}


def test_tests_of_a_task_expect_different_values(tasks: list[Task]) -> None:
    """Contract: a program that ignores its argument fails."""
    for task in tasks:
        expected = {test.rpartition(" == ")[2] for test in (*task.spec["shown"], *task.spec["hidden"])}
        assert len(expected) > 1, task.prompt


def test_same_recipe_gives_same_problem(records: list[dict], tasks: list[Task]) -> None:
    assert [CodeDomain().task(record, {}) for record in records[:20]] == tasks[:20]
    assert CodeDomain().task({**records[0], "seed": 1}, {}) != tasks[0]


def test_problem_by_hand() -> None:
    problem = make_problem(families()["list:above:square:sum"], [5, 4, 3], 0, 1, 3)
    assert problem.text == "the sum of the squares of the numbers in a above 5"
    assert dict(problem.references) == {
        "expression": "sum(b*b for b in a if b>5)",
        "loop": "c = []\nfor b in a:\n    if b>5:\n        c.append(b*b)\nreturn sum(c)",
        "functional": "sum(map(lambda b: b*b, filter(lambda b: b>5, a)))",
        "steps": "c = [b for b in a if b>5]\nreturn sum(b*b for b in c)",
    }
    misses = {source: (kind, outcome) for kind, source, outcome in problem.near_misses}
    assert misses["sum(b*b for b in a if b>=5)"] == ("boundary", "fail")
    assert misses["sum(b*b for b in a)"] == ("forgotten", "fail")
    assert misses["sum(b*b for b in c if b>5)"] == ("name", "error")
    assert misses["sum(b*b for b in a if b>5"] == ("bracket", "compile_error")
    assert evaluated(compiled("a+b"), ("a", "b"), [1, 2]) == 3


def test_recipes_mix_levels_and_keep_split_proportions() -> None:
    domain = CodeDomain()
    records = list(domain.recipes(520, 7))
    assert Counter(record["split"] for record in records) == {"train": 240, "valid": 30, "test": 250}
    shares = Counter(domain.record_difficulty(record) for record in records if record["split"] == "train")
    assert shares == {1.0: 60, 2.0: 120, 3.0: 60}
    assert set().union(*map(domain.record_kinds, records)) == domain.recipe_kinds()
    words = CodeDomain(CodeSettings(kinds=("word",), levels={1: 1.0, 2: 1.0}))
    assert words.recipe_kinds() == {"word of level 1", "word of level 2"}
    small = CodeDomain(CodeSettings(kinds=("number", "choice"), largest_constant=3, shown=1))
    drawn = list(small.recipes(300, 0))
    assert {constant for record in drawn for constant in record["constants"]} == {2, 3}
    assert len({small.task(record, {}).prompt for record in drawn}) == 300
    with pytest.raises(ValueError, match="no more different problems like those of family choice:"):
        next(CodeDomain(CodeSettings(kinds=("choice",), levels={3: 1.0}, shown=8, hidden=32)).recipes(1, 0))
    with pytest.raises(ValueError, match="no family of train, valid, test"):
        next(CodeDomain(CodeSettings(kinds=("word",), levels={3: 1.0})).recipes(1, 0))


def test_shipped_records_equal_recipes() -> None:
    domain = configured_domain("code", load_params(ROOT / "params.yaml"))
    lines = (ROOT / "data/raw/code.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert records[:1300] == list(domain.recipes(1300, 0))
    for record in records:
        domain.check(record)


# ---- contamination ---------------------------------------------------------------------------------------------------------


def test_solution_fingerprints_do_not_cross_splits() -> None:
    """Contract: over all families, styles and some constants."""
    rng = Random(3)
    owners: dict[str, set[str]] = defaultdict(set)
    for family in families().values():
        for _ in range(2):
            wording = family.wording(family.constants(rng))
            for _, source in wording.references:
                owners[fingerprint(source, wording.parameters)].add(family.split)
    assert all(len(splits) == 1 for splits in owners.values())


def test_behaviour_identifies_equivalent_functions() -> None:
    """Contract: functions with equal results are the same, however they are written, such as mirrored conditions or longer
    sums."""
    same = [("choice", "a+2 if a>4 else a", "a if a<5 else a+2"), ("number", "a+5-3", "a+2"), ("number", "(a+3)//3", "a//3+1")]
    same += [("list", "sum(b*3 for b in a)", "sum(b for b in a)*3"), ("word", "a[:3][:2]", "a[:2]")]
    for kind, one, other in same:
        assert behaviour(kind, ("a",), one) == behaviour(kind, ("a",), other)
    for kind, one, other in (("choice", "a+2 if a>4 else a", "a+2 if a>=4 else a"), ("list", "sum(a)", "max(a)")):
        assert behaviour(kind, ("a",), one) != behaviour(kind, ("a",), other)
    assert behaviour("choice", ("a",), "a") == behaviour("number", ("a",), "a")
    assert behaviour("number", ("a", "b"), "a-b") != behaviour("number", ("a", "b"), "a-b*1%9")


def test_mirrored_problem_counts_as_overlap() -> None:
    domain = CodeDomain()
    record = {"task_id": "one", "split": "test", "family": "choice:above:plus:itself", "constants": [4, 2, 5], "seed": 0}
    function = f"function {behaviour('choice', ('a',), 'a if a<5 else a+2')}"
    record["split"] = families()[record["family"]].split
    assert function in domain.entities(domain.task(record, {}))
    mirror = hand_task(family="choice:below:itself:plus", references=[{"style": "expression", "source": "a if a<5 else a+2"}])
    assert function in domain.entities(mirror)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("choice:above:plus:itself", "choice:below:itself:plus"),
        ("number:plus", "number:minus:plus"),
        ("number:over", "number:over:over"),
        ("number:times", "number:times:times"),
    ],
)
def test_equivalent_families_share_a_split(one: str, other: str) -> None:
    assert families()[one].split == families()[other].split


def test_shipped_functions_do_not_cross_splits() -> None:
    """Contract: compared by behaviour, over all records of the file, with the settings that made them."""
    owners: dict[str, set[str]] = defaultdict(set)
    for line in (ROOT / "data/raw/code.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        family = families()[record["family"]]
        wording = family.wording(record["constants"])
        owners[behaviour(family.kind, wording.parameters, wording.references[0][1])].add(record["split"])
    assert len(owners) > 500
    assert all(len(splits) == 1 for splits in owners.values())


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


@pytest.mark.parametrize(
    "source", ["1" + " + 1" * 20_000, "1" + " + 1" * 600, "-" * 50_000 + "1", "(" * 5_000 + "1" + ")" * 5_000]
)
def test_canonical_form_of_too_deep_solution_is_its_text(source: str) -> None:
    """Contract: evaluate compares the solutions of successes, and no program that a policy writes stops it."""
    assert canonical(f"{source}\n", "f", ("x",)) == source
    assert canonical("x  +  1", "f", ("x",)) == canonical("return x + 1", "f", ("x",)) != canonical("x + 2", "f", ("x",))


def test_fingerprint_ignores_names_constants_and_layout() -> None:
    same = ("def f(x):\n    return x + 1", "def plus(number: int) -> int:\n    '''Adds.'''\n    return number + 25  # more")
    assert fingerprint(same[0]) == fingerprint(same[1])
    assert fingerprint("import math\n" + same[0]) == fingerprint(same[0])
    assert fingerprint("a+1", ("a",)) == fingerprint("x+7", ("x",)) != fingerprint("a-1", ("a",))
    assert fingerprint("sum(a)", ("a",)) != fingerprint("max(a)", ("a",))
    assert fingerprint("c = a\nreturn c", ("a",)) == fingerprint("k = a\nreturn k", ("a",))


def test_phrases_by_hand() -> None:
    text = "Write a Function that returns the largest of all the numbers of a list."
    assert len(phrases(text)) == 2
    assert phrases(text) & phrases("please " + text.lower().replace("list.", "list"))
    assert phrases("The sum, of it") == {"the sum of it"}


# ---- playing ---------------------------------------------------------------------------------------------------------------

PROGRAMS = [
    ("sum(b for b in a if b>3)", "pass", 1.0, "passed.", 1.0),
    ("def f(a):\n    return sum(b for b in a if b>3)", "pass", 1.0, "passed.", 1.0),
    ("Here:\n```python\nsum(b for b in a if b>3)\n```\nDone.", "pass", 1.0, "passed.", 1.0),
    ("sum(b for b in a if b>=3)", "fail", -0.3, "failed.", 0.5),
    ("sum(a)", "fail", -0.3, "f([4, 2]) is 6, not 4", 0.5),
    ("4", "fail", -0.3, "failed.", 0.0),
    ("sum(c)", "error", -0.6, "f([4, 2]): NameError: name 'c' is not defined", 0.0),
    ("a[9]", "error", -0.6, "f([4, 2]): IndexError: list index out of range", 0.0),
    ("while True: pass", "error", -0.6, "f([4, 2]): more than 20000 steps", 0.0),
    ("def g(a): return a", "error", -0.6, "NameError: f is not defined", 0.0),
    ("1 / 0 if a[2:] else sum(b for b in a if b>3) / (len(a) and 1)", "error", -0.6, "failed.", 0.5),
    ("sum(a", "compile_error", -1.0, "SyntaxError: '(' was never closed", 0.0),
    ("", "compile_error", -1.0, "SyntaxError: there is no program", 0.0),
    ("the sum of a", "compile_error", -1.0, "SyntaxError: invalid syntax", 0.0),
]


@pytest.mark.parametrize(("action", "outcome", "reward", "text", "share"), PROGRAMS)
def test_outcome_reward_and_message_of_each_program(
    sandbox: Sandbox, action: str, outcome: str, reward: float, text: str, share: float
) -> None:
    _, environment = make(CodeSettings(rewards=CODERL), sandbox)
    environment.reset(hand_task())
    step = environment.step(action)
    assert (step.observation.text, step.reward, step.terminated, step.truncated) == (text, reward, True, False)
    assert {name for name, value in step.terms.items() if value == 1.0 and name != "tests"} == {outcome}
    assert step.terms["tests"] == share
    assert step.accepted == (outcome != "compile_error")
    with pytest.raises(RuntimeError, match="episode is over"):
        environment.step("1")


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


def test_repair_shows_failing_test_and_scores_last_program(sandbox: Sandbox) -> None:
    _, environment = make(CodeSettings(max_turns=3, rewards=CODERL), sandbox)
    environment.reset(hand_task())
    first = environment.step("sum(a)")
    assert (first.observation.text, first.reward, first.done, first.terms) == ("f([4, 2]) is 6, not 4", 0.0, False, {})
    before = environment.snapshot()
    assert environment.state_key() == "hand#sum(a)"
    second = environment.step("sum(a")
    assert (second.accepted, second.done) == (False, False)
    assert environment.state_key() == "hand#sum(a)"
    last = environment.step("sum(b for b in a if b > 3)")
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    environment.restore(before)
    environment.step("sum(a)")
    given_up = environment.step("sum(c)")
    assert (given_up.reward, given_up.terminated, given_up.truncated) == (-0.6, False, True)
    environment.restore(before)
    hidden = environment.step("sum(b for b in a if b>=3)")
    assert (hidden.reward, hidden.terminated) == (-0.3, True), "a program that passes the shown tests is submitted"
    assert "3, 5" not in hidden.observation.text, "a hidden test is never shown"


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


def test_known_actions_are_solutions_and_near_misses_with_returns() -> None:
    """Contract: solutions in all styles and near misses, with the returns of the configured rewards, without running any. With
    turns for repair a mistake does not end the episode, and only solutions are known."""
    near = [{"mistake": "name", "source": "sum(c)", "outcome": "error"}]
    task = hand_task(near_misses=[*hand_task().spec["near_misses"], *near])
    known = dict(CodeDomain(CodeSettings(rewards=CODERL)).known_actions(task))
    assert known == {
        "sum(b for b in a if b>3)": 1.0,
        "sum(b for b in a if b>=3)": -0.3,
        "sum(b for b in a if b>3": -1.0,
        "sum(c)": -0.6,
    }
    assert dict(CodeDomain(CodeSettings(max_turns=3)).known_actions(task)) == {"sum(b for b in a if b>3)": 1.0}


def test_experts_succeed_novices_fail_and_learners_repair(sandbox: Sandbox) -> None:
    """Contract: learners err first and repair it where they can."""
    domain, environment = make(CodeSettings(max_turns=2), sandbox)
    assert set(domain.players()) == {"expert", "learner", "novice"}
    rewards: dict[str, list[float]] = defaultdict(list)
    for player in domain.players():
        for game in range(4):
            rng, total, done = Random(game), 0.0, False
            environment.reset(hand_task())
            while not done:
                step = environment.step(domain.player_action(player, environment, rng))
                total, done = total + step.reward, step.done
            rewards[player].append(total)
    assert rewards["expert"] == [1.0] * 4
    assert rewards["novice"] == [0.0] * 4
    assert 1.0 in rewards["learner"], "the missing bracket is reported and repaired"
    assert 0.0 in rewards["learner"], "the boundary mistake passes the shown tests"


def test_admissible_actions_are_known_programs_that_compile(sandbox: Sandbox) -> None:
    domain, environment = make(CodeSettings(), sandbox)
    environment.reset(hand_task())
    assert isinstance(environment, Environment)
    assert isinstance(domain, Domain)
    assert environment.admissible() == ["sum(b for b in a if b>3)", "sum(b for b in a if b>=3)"]
    assert domain.expert(environment) == "sum(b for b in a if b>3)"
    environment.step("1")
    assert environment.admissible() == []
    assert domain.expert(environment) is None


def test_judge_runs_a_program_once() -> None:
    """Contract: outcomes are cached, since search returns to the same programs."""

    class Counting:
        ran = 0

        def run(self, program: Program, tests: Tests) -> Outcome:
            self.ran += 1
            return Outcome("ok", results=tuple(TestResult("pass") for _ in tests.sources))

    counting = Counting()
    judge = Judge(counting)  # type: ignore[arg-type]
    for _ in range(3):
        assert judge.outcome(hand_task(), "1").passed
    judge.outcome(hand_task(), "2")
    assert counting.ran == 2


def test_returns_span_the_rewards() -> None:
    assert CodeDomain().returns() == (0.0, 1.0)
    assert CodeDomain(CodeSettings(rewards=CODERL)).returns() == (-1.0, 1.0)


def test_code_blocks_are_unwrapped() -> None:
    assert unfenced("a+1") == "a+1"
    assert unfenced("```py\none\n```\nno:\n```\ntwo\n```") == "two\n"


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
