"""Reads problems in the format of MBPP (arXiv 2108.07732) or HumanEval (arXiv 2107.03374) from JSON or JSON Lines files."""

from __future__ import annotations

import ast
import doctest
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.environments.base_domain import SHARES, hashed_split
from stages.environments.code.fingerprint import fingerprint
from stages.records.task import Split

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
"""Fields of a raw record."""
_SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "dev": "valid", "test": "test"}


def folder_records(folder: Path, shown: int) -> list[dict[str, Any]]:
    """Raw records of all problems, in the order of file names and lines.

    A problem's split is its own field "split", or given by the file name (train.jsonl, mbpp_validation.json), or a hash of its
    solution, so that equal solutions share a split. Raises FileNotFoundError if there are none, ValueError naming a
    problem that can't be read.
    """
    files = sorted(path for kind in ("*.json", "*.jsonl") for path in folder.glob(kind))
    if not files:
        raise FileNotFoundError(
            f"{folder} has no .json or .jsonl file; put problems in the format of MBPP or HumanEval there, or set "
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
        raise ValueError(f"{path.name} must be a list of problems, or one problem per line (.jsonl)")
    return found


def _parse(text: bytes, where: str) -> Any:
    """A JSON value that can be encoded as UTF-8. Raises ValueError naming `where` it is."""
    try:
        value = json.loads(text.decode("utf-8"))
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError(f"{where} is not JSON (values are nested too deeply)") from error
    except ValueError as error:  # also lone surrogates and NaN, which json.loads accepts
        raise ValueError(f"{where} is not JSON ({error})") from error
    return value


def _split(problem: Mapping[str, Any], path: Path, record: Mapping[str, Any]) -> Split:
    words = [str(problem["split"])] if "split" in problem else re.split(r"[^a-z]+", path.stem.lower())
    for word in words:
        if word in _SPLIT_NAMES:
            return _SPLIT_NAMES[word]  # type: ignore[return-value]
    if "split" in problem:
        raise ValueError(f"'split' must be one of {sorted(_SPLIT_NAMES)}, not {problem['split']!r}")
    return hashed_split(SHARES, "code_folder.split", fingerprint(record["solution"]))


def _task_id(problem: Mapping[str, Any], shape: str) -> str:
    """ "mbpp-601", "HumanEval-0"."""
    given = re.sub(r"[^A-Za-z0-9._-]+", "-", str(problem["task_id"]))
    return given if not given.isdigit() else f"{shape}-{given}"


def of_mbpp(problem: Mapping[str, Any], shown: int) -> dict[str, Any]:
    """A record from `task_id`, `text` (or `prompt`), `code`, `test_list` and, optionally, `test_setup_code`, `test_imports` and
    `challenge_test_list`. At most `shown` tests are shown and at least one is hidden. Raises ValueError or KeyError."""
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
    """A record from `task_id`, `prompt`, `entry_point`, `canonical_solution` and `test`. The docstring's examples with literal
    results are the shown tests. Raises ValueError or KeyError."""
    prompt, entry = problem["prompt"], problem["entry_point"]
    tree = ast.parse(prompt + "\n    pass\n")
    function = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry), None)
    if function is None:
        raise ValueError(f"'prompt' does not define the function {entry}")
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
    """The parameters without annotations, as one string: ["a, b=2"]."""
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return [text] if (text := ast.unparse(function.args)) else []


def _examples(docstring: str) -> list[str]:
    """Doctest examples with literal results, as asserts."""
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
    """Raise ValueError for fields that are not text, and for a solution or tests that are not valid Python."""
    for name in ("parameters", "shown", "hidden"):
        if not all(isinstance(item, str) for item in record[name]):
            raise ValueError(f"'{name}' must be a list of strings")
    if not record["hidden"]:
        raise ValueError("'hidden' is empty; add at least one test")
    sources = [(name, source) for name in ("solution", "context", "shown", "hidden") for source in _as_list(record[name])]
    for name, source in sources:
        try:
            ast.parse(source)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"'{name}' is not valid Python ({error}): {source[:80]!r}") from error


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
