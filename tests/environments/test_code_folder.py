"""Problems from files as a domain: formats, splits, checks, contamination."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tiny import make_tiny_tokenizer

from stages.agent.chat import Chat
from stages.curation.assemble import assemble
from stages.curation.cleaning import task_faults
from stages.curation.demonstrations import DemonstrationPlan, demonstrate
from stages.curation.raw import RawRecord, make_raw
from stages.curation.settings import Curate
from stages.environments.code import CodeFolderDomain, FolderSettings
from stages.environments.code.environment import Judge
from stages.environments.code.folder import folder_records
from stages.environments.protocol import Domain
from stages.records.task import SPLITS
from stages.sandbox import Outcome, Program, Sandbox, TestResult, Tests

pytestmark = pytest.mark.long(10)
ROOT = Path(__file__).resolve().parents[2]

MBPP = {
    "task_id": 601,
    "text": "Write a function to double a number.",
    "code": "def twice(n):\n    return 2 * n",
    "test_list": ["assert twice(1) == 2", "assert twice(4) == 8"],
    "challenge_test_list": ["assert twice(-1) == -2"],
}
HUMANEVAL = {
    "task_id": "HumanEval/7",
    "prompt": 'import math\n\ndef area(r: float) -> float:\n    """ Of a circle.\n    >>> area(0)\n    0.0\n    """\n',
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "\n\ndef check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n",
}


def folder_domain(folder: Path, sandbox: Sandbox, **settings) -> CodeFolderDomain:
    domain = CodeFolderDomain(FolderSettings(**settings).model_copy(update={"folder": str(folder)}))
    domain.__dict__["_judge"] = Judge(sandbox)
    return domain


def write_problems(folder: Path, name: str, *problems: dict) -> None:
    text = json.dumps(list(problems)) if name.endswith(".json") else "".join(json.dumps(one) + "\n" for one in problems)
    (folder / name).write_text(text, encoding="utf-8")


def test_mbpp_and_humaneval_formats_are_read(tmp_path: Path) -> None:
    write_problems(tmp_path, "mbpp_validation.json", MBPP)
    write_problems(tmp_path, "humaneval-test.jsonl", HUMANEVAL)
    circle, twice = folder_records(tmp_path, 1)
    assert (twice["task_id"], twice["split"], twice["entry"], twice["parameters"]) == ("mbpp-601", "valid", "twice", ["n"])
    assert twice["prompt"] == "Write a function to double a number.\nYour code should pass:\nassert twice(1) == 2"
    assert twice["hidden"] == ["assert twice(4) == 8", "assert twice(-1) == -2"]
    assert (circle["task_id"], circle["split"], circle["context"]) == ("HumanEval-7", "test", "import math")
    assert circle["shown"] == ["assert area(0) == 0.0"]
    assert circle["hidden"] == [HUMANEVAL["test"] + "\ncheck(area)\n"]
    assert circle["prompt"] == "Complete the function.\n" + HUMANEVAL["prompt"].rstrip()


def test_split_of_unassigned_problems_follows_their_solution(tmp_path: Path) -> None:
    """Contract: problems whose solutions differ only in names and constants are in the same split."""
    copies = [
        {**MBPP, "task_id": number, "code": f"def f{number}(v{number}):\n    return {number} * v{number}"} for number in range(9)
    ]
    for number, copy in enumerate(copies):
        copy["test_list"] = [f"assert f{number}(1) == {number}"]
    different = [{**MBPP, "task_id": 100 + n, "code": "def twice(n):\n    return 2 * n" + " * n" * n} for n in range(40)]
    write_problems(tmp_path, "problems.jsonl", *copies, *different)
    records = folder_records(tmp_path, 1)
    assert len({record["split"] for record in records[:9]}) == 1
    assert {record["split"] for record in records} == set(SPLITS)


def test_shipped_folder_passes_curation(sandbox: Sandbox, tmp_path: Path) -> None:
    """Contract: the shipped folder, with both formats, needs no raw file; its own solutions pass."""
    domain = folder_domain(ROOT / "data/raw/code_folder", sandbox)
    assert isinstance(domain, Domain)
    records, rejections = make_raw(domain, {"train": 9, "valid": 9, "test": 9}, 0)
    assert (len(records), rejections) == (9, [])
    assembly = assemble(domain, records, {"train": 9, "valid": 9, "test": 9}, tmp_path / "worlds", 1, 640)
    assert assembly.rejections == []
    assert Counter(task.split for task in assembly.tasks) == {"train": 4, "valid": 2, "test": 3}
    environment = domain.make(tmp_path)
    plan = DemonstrationPlan(Curate(noisy_demonstrations=0), seed=0, max_length=640)
    for task in assembly.tasks:
        assert [episode.success for episode in demonstrate(domain, environment, task, plan).episodes] == [True], task.task_id
    environment.reset(next(task for task in assembly.tasks if task.task_id == "Ours-1"))
    assert environment.step("    return word[count:] + word[:count]").terms["fail"] == 1.0


LOOP = """    for letter in word:
        if runs and runs[-1][0] == letter:
            runs[-1] = (letter, runs[-1][1] + 1)
        else:
            runs.append((letter, 1))
    return runs
"""
BODIES = (
    "    runs = []\n" + LOOP,
    "    for _ in '.':\n        runs = []\n" + LOOP,
    "    for runs in [[]]:\n    " + LOOP.rstrip().replace("\n", "\n    "),
    "    def new():\n        return []\n    runs = new()\n" + LOOP,
    "    runs = [\n  ]\n" + LOOP,
    '    assert """\nof two\n""" == "\\nof two\\n"\n    runs = []\n' + LOOP,
    "    runs = []\n# every letter\n\n" + LOOP,
    ("    runs = []\n" + LOOP).replace("    ", "  "),
    ("    runs = []\n" + LOOP).replace("    ", "\t"),
    "    runs = []\n" + LOOP + "\n\nprint(encoded('aab'))\n",
    "    return [(letter, len(list(run))) for letter, run in __import__('itertools').groupby(word)]\n",
)
"""Bodies for Ours/2, as a model might continue its prompt."""


def test_unfenced_bodies_run_as_they_were_written(sandbox: Sandbox, tmp_path: Path) -> None:
    """Contract: a body without a fence, as a model continues the prompt, keeps its indentation, although an action has no outer
    white space."""
    chat = Chat(make_tiny_tokenizer())
    domain = folder_domain(ROOT / "data/raw/code_folder", sandbox, max_turns=1)
    tasks = {record["task_id"]: domain.task(record, {}) for record in domain.recipes(9, 0)}
    bodies = [("Ours-2", body) for body in BODIES]
    for line in (ROOT / "data/raw/code_folder/humaneval.jsonl").read_text(encoding="utf-8").splitlines():
        shipped = json.loads(line)
        bodies.append((shipped["task_id"].replace("/", "-"), shipped["canonical_solution"]))
    for task_id, body in bodies:
        action = chat.action_text(chat.assistant_tokens(body))
        assert action == body.strip()
        environment = domain.make(tmp_path)
        environment.reset(tasks[task_id])
        assert environment.step(action).terms["pass"] == 1.0, body


def test_restored_indentation_hides_no_other_syntax_error(sandbox: Sandbox) -> None:
    """Contract: restoring the indentation repairs no other error, and the message refers to the program as it was written."""
    for body in (
        "x = (\n    return x",
        "x = 1\n    return x\n  return x",
        "if word:\n    return word\n        return 1",
        "return word:\n    ",
    ):
        outcome = sandbox.run(Program(body, "f", ("word",)), Tests(("assert f('a') == 'a'",)))
        assert outcome.status == "compile_error", body
    outcome = sandbox.run(Program("word = 1 +\n    return word", "f", ("word",)), Tests(("assert f('a')",)))
    assert outcome.message == "SyntaxError: invalid syntax"


def test_problem_with_failing_solution_is_rejected_by_name(sandbox: Sandbox, tmp_path: Path) -> None:
    wrong = {**MBPP, "task_id": 1, "split": "train", "code": "def twice(n):\n    return 3 * n"}
    objects = {**MBPP, "task_id": 2, "split": "train", "test_list": ["assert twice(print)", "assert twice(4) == 8"]}
    write_problems(tmp_path, "mbpp.jsonl", wrong, objects, {**MBPP, "split": "test"})
    domain = folder_domain(tmp_path, sandbox)
    records = [RawRecord(record, "here", number) for number, record in enumerate(domain.recipes(9, 0))]
    assembly = assemble(domain, records, {"train": 2, "valid": 0, "test": 1}, tmp_path / "worlds", 1, 640)
    details = {rejection.task_id: rejection.detail for rejection in assembly.rejections}
    assert "does not pass its tests (fail: assert twice(1) == 2: AssertionError)" in details["mbpp-1"]
    assert "does not pass its tests (broken: twice is called with what can't be handed to it" in details["mbpp-2"]
    assert [task.task_id for task in assembly.tasks] == ["mbpp-601"]


def test_training_problem_that_overlaps_a_test_problem_is_rejected(tmp_path: Path) -> None:
    """Contract: an overlap is the same solution, or 13 words of the description in a row."""
    text = "Write a function that returns the largest of all the numbers of a list of lists."
    tested = {**MBPP, "task_id": 1, "split": "test", "text": text}
    renamed = {
        **MBPP,
        "task_id": 2,
        "split": "train",
        "code": "def double(x):\n    return 7 * x",
        "test_list": ["assert double(1) == 7"],
    }
    reworded = {**MBPP, "task_id": 3, "split": "train", "text": "Please: " + text, "code": "def twice(n):\n    return n + n"}
    fresh = {**MBPP, "task_id": 4, "split": "train", "code": "def twice(n):\n    return n - -n"}
    write_problems(tmp_path, "mbpp.jsonl", tested, renamed, reworded, fresh)

    class Passing:
        def run(self, program: Program, tests: Tests) -> Outcome:
            return Outcome("ok", results=tuple(TestResult("pass") for _ in tests.sources))

    domain = folder_domain(tmp_path, Passing())  # type: ignore[arg-type]
    faults = task_faults([domain.task(record, {}) for record in domain.recipes(9, 0)], domain, 640)
    assert {task_id: reason for task_id, (reason, _) in faults.items()} == {"mbpp-2": "split_overlap", "mbpp-3": "split_overlap"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_list": [], "challenge_test_list": []}, "mbpp.jsonl: problem 1: 'test_list' is empty"),
        ({"code": "twice = 2"}, "its first test calls none of the functions"),
        ({"code": "def twice(n:"}, "mbpp.jsonl: problem 1: "),
        ({"code": None}, "mbpp.jsonl: problem 1: "),
        ({"split": "dev2"}, "'split' must be one of"),
    ],
)
def test_invalid_problem_error_names_file_and_problem(tmp_path: Path, change: dict, message: str) -> None:
    write_problems(tmp_path, "mbpp.jsonl", {**MBPP, **change})
    with pytest.raises(ValueError, match=message):
        folder_records(tmp_path, 1)


def test_invalid_folder_or_record_error_names_the_problem(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no .json or .jsonl file; put problems"):
        folder_records(tmp_path, 1)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x.json must be a list of problems"):
        folder_records(tmp_path, 1)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x.json is not JSON"):
        folder_records(tmp_path, 1)
    write_problems(tmp_path, "x.json", {name: value for name, value in MBPP.items() if name != "code"})
    with pytest.raises(ValueError, match="problem 1: 'code' is missing"):
        folder_records(tmp_path, 1)
    domain = CodeFolderDomain()
    record = next(domain.recipes(1, 0))
    for change, message in (
        ({"hidden": []}, "'hidden' is empty"),
        ({"solution": "def"}, "'solution' is not valid Python"),
        ({"shown": [1]}, "list of strings"),
    ):
        with pytest.raises(ValueError, match=message):
            domain.check({**record, **change})


@pytest.mark.parametrize("folder", ["/tmp/elsewhere", "data/raw", "data/raw/../curated", "problems"])
def test_folder_outside_data_raw_is_rejected(folder: str) -> None:
    with pytest.raises(ValueError, match="below data/raw"):
        FolderSettings(folder=folder)
    assert FolderSettings(folder="data/raw/mine/of_today").folder == "data/raw/mine/of_today"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"task_id": "\xff"}', r"mbpp_train\.jsonl:2 is not JSON .*utf-8"),
        (b"[" * 100_000, r"mbpp_train\.jsonl:2 is not JSON \(values are nested too deeply\)"),
        (b'{"task_id": ' + b"9" * 5000 + b"}", r"mbpp_train\.jsonl:2 is not JSON .*4300 digits"),
        (b'{"task_id": "\\ud800"}', r"mbpp_train\.jsonl:2 is not JSON .*surrogates"),
        (b'{"task_id": NaN}', r"mbpp_train\.jsonl:2 is not JSON"),
    ],
)
def test_unreadable_line_error_names_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "mbpp_train.jsonl").write_bytes(json.dumps(MBPP).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=message):
        folder_records(tmp_path, 1)


def test_unicode_line_separators_do_not_end_a_json_line(tmp_path: Path) -> None:
    text = "Write a function\u2028to double\x85a number."
    (tmp_path / "mbpp_train.jsonl").write_text(json.dumps({**MBPP, "text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [record["text"] for record in folder_records(tmp_path, 1)] == [text]
