"""Makes a problem from a family and its constants: tests that distinguish mistakes from solutions, and the outcome of each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stages.environments.code.families import ENTRY, Family, Wording
from stages.seeding import stream

Result = Literal["pass", "fail", "error", "compile_error"]
DRAWS = 400
"""Attempts to draw an input before a family's constants are rejected."""


@dataclass(frozen=True)
class Problem:
    """The contents of a task's spec. `shown` and `hidden`: tests as assert statements; `references`: (style, source);
    `near_misses`: (kind of mistake, source, result of all tests)."""

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
            "near_misses": [{"mistake": kind, "source": source, "outcome": result} for kind, source, result in self.near_misses],
        }


def make_problem(family: Family, constants: Sequence[int], seed: int, shown: int, hidden: int, *, signs: bool = False) -> Problem:
    """The problem, deterministically. Raises ValueError if there are too few different inputs or all have the same result."""
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
        value = evaluated(solution, wording.parameters, arguments)
        if isinstance(value, Raised) or repr(arguments) in seen:
            continue
        # Prefer inputs that reveal a mistake which no earlier input revealed; later accept any.
        revealed = {source for source, code in open_mistakes.items() if evaluated(code, wording.parameters, arguments) != value}
        if not revealed and open_mistakes and draw < DRAWS // 2:
            continue
        for source in revealed:
            del open_mistakes[source]
        seen.add(repr(arguments))
        cases.append((arguments, value))
    if len(cases) < shown + hidden or all(equal(value, cases[0][1]) for _, value in cases):
        raise ValueError(f"family {family.name} with {list(constants)} has no {shown + hidden} tests that differ")
    # The first cases reveal the most mistakes; they become the hidden tests.
    ordered = [*cases[hidden:], *cases[:hidden]]
    tests = [test_of(arguments, value) for arguments, value in ordered]
    misses = _outcomes(wording, mistakes, ordered)
    text = wording.signs if signs else wording.text
    return Problem(ENTRY, wording.parameters, text, tuple(tests[:shown]), tuple(tests[shown:]), wording.references, misses)


def test_of(arguments: Sequence[Any], value: Any) -> str:
    return f"assert {ENTRY}({', '.join(map(repr, arguments))}) == {value!r}"


def _outcomes(wording: Wording, mistakes: Sequence[tuple[str, str, Any]], cases: Sequence[tuple[list[Any], Any]]) -> tuple:
    """Near misses that fail some test, each once, with their result."""
    found: dict[str, tuple[str, str, Result]] = {}
    for kind, source, code in mistakes:
        result: Result = "compile_error"
        if code is not None:
            values = [(evaluated(code, wording.parameters, arguments), value) for arguments, value in cases]
            raised = any(isinstance(actual, Raised) for actual, _ in values)
            result = "error" if raised else "pass" if all(equal(actual, value) for actual, value in values) else "fail"
        if result != "pass":
            found.setdefault(source, (kind, source, result))
    return tuple(found.values())


@dataclass(frozen=True)
class Raised:
    """The result of an expression that raised an exception."""

    kind: str


def compiled(source: str) -> Any:
    """Bytecode of an expression; None for a syntax error."""
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # some mistakes cause one
        try:
            return compile(source, "<piece>", "eval")
        except SyntaxError:
            return None


def evaluated(code: Any, parameters: Sequence[str], arguments: Sequence[Any]) -> Any:
    """The value of a trusted expression, or `Raised`."""
    scope = dict(zip(parameters, (list(item) if isinstance(item, list) else item for item in arguments), strict=True))
    try:
        value = eval(code, scope)
    except Exception as error:
        return Raised(type(error).__name__)
    return Raised("TypeError") if callable(value) else value  # the sandbox can't return a function


def equal(actual: Any, expected: Any) -> bool:
    return bool(actual == expected)


def known_programs(spec: Mapping[str, Any]) -> list[tuple[str, Result]]:
    """A task's programs and their results: references in all styles, then near misses. Off-policy methods train on them."""
    references: list[tuple[str, Result]] = [(one["source"], "pass") for one in spec["references"]]
    return references + [(one["source"], one["outcome"]) for one in spec["near_misses"]]
