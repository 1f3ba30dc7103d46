"""Problems from files in the shape of MBPP (arXiv 2108.07732) or HumanEval (arXiv 2107.03374), JSON or JSON lines."""

from __future__ import annotations

import ast
import doctest
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.environments.base_domain import SHARES
from stages.environments.code.fingerprint import fingerprint
from stages.records.task import SPLITS, Split
from stages.seeding import key64

FIELDS: dict[str, type] = {
    "task_id": str,
    "split": str,
    "entry": str,
    "parameters": list,
    "text": str,
    "prompt": str,
    "context": str,
    "shown": list,
    "hidden": list,
    "solution": str,
}
"""Of a raw record, whichever shape it came in."""
_NAMED = {"train": "train", "valid": "valid", "validation": "valid", "dev": "valid", "test": "test"}


def folder_records(folder: Path, shown: int) -> list[dict[str, Any]]:
    """All problems of all files, in the order of names and lines.

    A problem's split is what it says itself ("split"), what its file's name says (train.jsonl, mbpp_validation.json), or drawn by
    its solution, so that two problems with one solution come to one split. Raises FileNotFoundError if there are no files,
    ValueError naming file and problem for one that can't be read.
    """
    files = sorted(path for kind in ("*.json", "*.jsonl") for path in folder.glob(kind))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no .json or .jsonl file; put problems in the shape of MBPP or HumanEval there, or set "
            "per_domain.code_folder.environment.folder"
        )
    records = []
    for path in files:
        for number, problem in enumerate(_read(path), start=1):
            try:
                record = of_humaneval(problem) if "entry_point" in problem else of_mbpp(problem, shown)
                records.append({**record, "split": _split(problem, path, record)})
            except (KeyError, TypeError, ValueError, SyntaxError) as error:
                what = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path.name}: problem {number}: {what}") from error
    return [{name: record[name] for name in FIELDS} for record in records]


def _read(path: Path) -> list[Mapping[str, Any]]:
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        lines = enumerate(data.splitlines(), start=1)
        found = [_parse(line, f"{path.name}:{number}") for number, line in lines if line.strip()]
    else:
        found = _parse(data, path.name)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{path.name} must hold a list of problems, or one in each line")
    return found


def _parse(text: bytes, where: str) -> Any:
    """A JSON value that UTF-8 can hold. Raises ValueError naming `where` it stands."""
    try:
        value = json.loads(text.decode("utf-8"))
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError(f"{where} is not JSON (values are nested too deeply)") from error
    except ValueError as error:  # what json.loads takes and no table holds, too: half a surrogate pair, NaN
        raise ValueError(f"{where} is not JSON ({error})") from error
    return value


def _split(problem: Mapping[str, Any], path: Path, record: Mapping[str, Any]) -> Split:
    words = [str(problem["split"])] if "split" in problem else re.split(r"[^a-z]+", path.stem.lower())
    for word in words:
        if word in _NAMED:
            return _NAMED[word]  # type: ignore[return-value]
    if "split" in problem:
        raise ValueError(f"'split' must be one of {sorted(_NAMED)}, not {problem['split']!r}")
    place = key64("code_folder.split", fingerprint(record["solution"])) % sum(SHARES.values())
    return SPLITS[0] if place < SHARES["train"] else SPLITS[1] if place < SHARES["train"] + SHARES["valid"] else SPLITS[2]


def _task_id(problem: Mapping[str, Any], shape: str) -> str:
    """ "mbpp-601", "HumanEval-0"."""
    given = re.sub(r"[^A-Za-z0-9._-]+", "-", str(problem["task_id"]))
    return given if not given.isdigit() else f"{shape}-{given}"


def of_mbpp(problem: Mapping[str, Any], shown: int) -> dict[str, Any]:
    """A problem with `task_id`, `text` (or `prompt`), `code` and `test_list`; also `test_setup_code`, `test_imports` and
    `challenge_test_list`. At most `shown` tests are shown, and one at least is hidden. Raises ValueError or KeyError."""
    tests = [*problem["test_list"], *problem.get("challenge_test_list", ())]
    if not tests:
        raise ValueError("'test_list' is empty")
    functions = {node.name: node for node in ast.parse(problem["code"]).body if isinstance(node, ast.FunctionDef)}
    called = [
        node.func.id for node in ast.walk(ast.parse(tests[0])) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    entry = next((name for name in called if name in functions), None)
    if entry is None:
        raise ValueError(f"its first test calls none of the functions of 'code' ({', '.join(functions) or 'there are none'})")
    visible = tests[: min(shown, len(tests) - 1)]
    text = problem["text"] if "text" in problem else problem["prompt"]
    return {
        "task_id": _task_id(problem, "mbpp"),
        "entry": entry,
        "parameters": _parameters(functions[entry]),
        "text": text,
        "prompt": "\n".join([text, *(["Your code should pass:", *visible] if visible else [])]),
        "context": "\n".join([*problem.get("test_imports", ()), problem.get("test_setup_code", "")]).strip(),
        "shown": visible,
        "hidden": tests[len(visible) :],
        "solution": problem["code"],
    }


def of_humaneval(problem: Mapping[str, Any]) -> dict[str, Any]:
    """A problem with `task_id`, `prompt`, `entry_point`, `canonical_solution` and `test`. The examples of its docstring that are
    plain values are the tests that are shown. Raises ValueError or KeyError."""
    prompt, entry = problem["prompt"], problem["entry_point"]
    tree = ast.parse(prompt + "\n    pass\n")
    function = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry), None)
    if function is None:
        raise ValueError(f"'prompt' does not begin the function {entry}")
    docstring = ast.get_docstring(function) or ""
    before = prompt.splitlines()[: function.lineno - 1 - len(function.decorator_list)]
    return {
        "task_id": _task_id(problem, "HumanEval"),
        "entry": entry,
        "parameters": _parameters(function),
        "text": docstring,
        "prompt": f"Complete the function.\n{prompt.rstrip()}",
        "context": "\n".join(before).strip(),
        "shown": _examples(docstring),
        "hidden": [f"{problem['test']}\ncheck({entry})\n"],
        "solution": prompt + problem["canonical_solution"],
    }


def _parameters(function: ast.FunctionDef) -> list[str]:
    """As they stand in a head, without annotations, all in one text: ["a, b=2"]."""
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return [text] if (text := ast.unparse(function.args)) else []


def _examples(docstring: str) -> list[str]:
    """`>>> f(1)` followed by a plain value, as asserts."""
    found = []
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:
        return []
    for example in examples:
        call, value = example.source.strip(), example.want.strip()
        try:
            ast.literal_eval(value)
            ast.parse(call, mode="eval")
        except (ValueError, SyntaxError):
            continue
        found.append(f"assert {call} == {value}")
    return found


def check_problem(record: Mapping[str, Any]) -> None:
    """Raise ValueError, saying what is wrong, for a record whose texts are none, or whose solution or tests are no Python."""
    for name in ("parameters", "shown", "hidden"):
        if not all(isinstance(item, str) for item in record[name]):
            raise ValueError(f"'{name}' must be a list of texts")
    if not record["hidden"]:
        raise ValueError("'hidden' is empty: a program that nothing tests passes")
    for name, source in (("solution", record["solution"]), ("context", record["context"])):
        _parsed(name, source)
    for name in ("shown", "hidden"):
        for source in record[name]:
            _parsed(name, source)


def _parsed(name: str, source: str) -> None:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"'{name}' is no Python ({error}): {source[:80]!r}") from error
