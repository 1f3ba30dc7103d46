"""From a family and its constants to a problem: tests that tell its mistakes from its solutions, and what both come to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stages.environments.code.families import ENTRY, Family, Wording
from stages.seeding import stream

Result = Literal["pass", "fail", "error", "compile_error"]
DRAWS = 400
"""Inputs that are drawn before a family's constants are given up."""


@dataclass(frozen=True)
class Problem:
    """All that a task's spec holds. `shown` and `hidden`: tests, statements with asserts; `near_misses`: (kind, source, what it
    comes to on all tests)."""

    entry: str
    parameters: tuple[str, ...]
    text: str
    shown: tuple[str, ...]
    hidden: tuple[str, ...]
    references: tuple[tuple[str, str], ...]
    near_misses: tuple[tuple[str, str, Result], ...] = ()
    context: str = ""

    def to_spec(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "entry": self.entry,
            "parameters": list(self.parameters),
            "context": self.context,
            "shown": list(self.shown),
            "hidden": list(self.hidden),
            "references": [{"style": style, "source": source} for style, source in self.references],
            "near_misses": [{"mistake": kind, "source": source, "outcome": told} for kind, source, told in self.near_misses],
        }


def make_problem(family: Family, constants: Sequence[int], seed: int, shown: int, hidden: int, *, signs: bool = False) -> Problem:
    """The same arguments always give the same problem. Raises ValueError where so many different inputs can't be found, or all
    give the same."""
    wording = family.wording(constants)
    solution = compiled(wording.references[0][1])
    assert solution is not None
    rng = stream("code.tests", family.name, tuple(constants), seed)
    mistakes = [
        (kind, source, compiled(source)) for kind, source in wording.mistakes if source not in dict(wording.references).values()
    ]
    open_mistakes = {source: code for _, source, code in mistakes if code is not None}
    cases: list[tuple[list[Any], Any]] = []
    seen: set[str] = set()
    for draw in range(DRAWS):
        if len(cases) == shown + hidden:
            break
        arguments = family.inputs(constants, rng)
        value = called(solution, wording.parameters, arguments)
        if isinstance(value, Raised) or repr(arguments) in seen:
            continue
        # First come inputs on which some mistake shows that showed on none before; later any will do.
        told = {source for source, code in open_mistakes.items() if called(code, wording.parameters, arguments) != value}
        if not told and open_mistakes and draw < DRAWS // 2:
            continue
        for source in told:
            del open_mistakes[source]
        seen.add(repr(arguments))
        cases.append((arguments, value))
    if len(cases) < shown + hidden or all(equal(value, cases[0][1]) for _, value in cases):
        raise ValueError(f"family {family.name} with {list(constants)} has no {shown + hidden} tests that differ")
    # The tests that tell most come first; they are hidden ones.
    ordered = [*cases[hidden:], *cases[:hidden]]
    tests = [test_of(arguments, value) for arguments, value in ordered]
    misses = _outcomes(wording, mistakes, ordered)
    text = wording.signs if signs else wording.text
    return Problem(ENTRY, wording.parameters, text, tuple(tests[:shown]), tuple(tests[shown:]), wording.references, misses)


def test_of(arguments: Sequence[Any], value: Any) -> str:
    return f"assert {ENTRY}({', '.join(map(repr, arguments))}) == {value!r}"


def _outcomes(wording: Wording, mistakes: Sequence[tuple[str, str, Any]], cases: Sequence[tuple[list[Any], Any]]) -> tuple:
    """Near misses that do not pass, each once, with what they come to."""
    found: dict[str, tuple[str, str, Result]] = {}
    for kind, source, code in mistakes:
        told: Result = "compile_error"
        if code is not None:
            values = [(called(code, wording.parameters, arguments), value) for arguments, value in cases]
            raised = any(isinstance(mine, Raised) for mine, _ in values)
            told = "error" if raised else "pass" if all(equal(mine, value) for mine, value in values) else "fail"
        if told != "pass":
            found.setdefault(source, (kind, source, told))
    return tuple(found.values())


@dataclass(frozen=True)
class Raised:
    """In place of a value."""

    kind: str


def compiled(source: str) -> Any:
    """Code of an expression of ours; None if it is none."""
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # it is a mistake that Python notices
        try:
            return compile(source, "<piece>", "eval")
        except SyntaxError:
            return None


def called(code: Any, parameters: Sequence[str], arguments: Sequence[Any]) -> Any:
    """What an expression of ours gives; `Raised` if it raises. Generators are what a program returns: no list."""
    scope = dict(zip(parameters, (list(item) if isinstance(item, list) else item for item in arguments), strict=True))
    try:
        value = eval(code, scope)
    except Exception as error:
        return Raised(type(error).__name__)
    return Raised("TypeError") if callable(value) else value  # no plain value: the sandbox can't hand it out


def equal(mine: Any, value: Any) -> bool:
    return bool(mine == value)


def stored_programs(spec: Mapping[str, Any]) -> list[tuple[str, Result]]:
    """The programs that come with a task and what each comes to: references in all styles, then near misses; what an off-policy
    method learns from beside its own samples."""
    references: list[tuple[str, Result]] = [(one["source"], "pass") for one in spec["references"]]
    return references + [(one["source"], one["outcome"]) for one in spec["near_misses"]]
