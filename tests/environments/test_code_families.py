"""Families of the code domain: their splits, solutions, near misses and recipes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from stages.curation.__main__ import configured_domain
from stages.environments.code import CodeDomain, CodeSettings
from stages.environments.code.families import Family, families
from stages.environments.code.problems import Problem, compiled, evaluated, make_problem
from stages.environments.code.settings import Style
from stages.params import load_params

pytestmark = pytest.mark.long(13)
ROOT = Path(__file__).resolve().parents[2]


def drawn_problem(family: Family, rng: Random) -> Problem:
    """Retries, since some constants leave too few distinct tests."""
    for _ in range(50):
        with suppress(ValueError):
            return make_problem(family, family.constants(rng), 0, 2, 4)
    raise AssertionError(family.name)


def test_training_families_cover_every_piece() -> None:
    pieces: dict[str, set[str]] = defaultdict(set)
    for family in families().values():
        pieces[family.split] |= {f"{family.kind} {piece.name}" for piece in family.pieces}
    assert pieces["train"] == set().union(*pieces.values())
    assert {family.level for family in families().values() if family.split == "test"} == {1, 2, 3}


def test_solutions_of_all_styles_pass_and_near_misses_cover_outcomes() -> None:
    """Contract: holds for every family; expressions run in this process, programs in the sandbox of test_code_tasks.py."""
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


@pytest.mark.slow
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
