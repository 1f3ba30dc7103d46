"""Fingerprints, behaviour and phrases by which the code domain finds problems that two splits share."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
from code_games import hand_task

from stages.environments.code import CodeDomain
from stages.environments.code.behaviour import behaviour
from stages.environments.code.families import families
from stages.environments.code.fingerprint import canonical, fingerprint, phrases

ROOT = Path(__file__).resolve().parents[2]


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


def test_parameters_may_be_parts_of_a_signature() -> None:
    """As code_folder stores them: ["a, b=2"]."""
    assert canonical("def f(a, b=2):\n    return a + b", "f", ("a, b=2",)) == canonical("a + b", "f", ("a, b=2",))
    assert fingerprint("a + b", ("a, b=2",)) == fingerprint("x + y", ("x", "y"))
