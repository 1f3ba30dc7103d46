"""Families of problems: combinations of pieces. A family belongs to one split; its constants and tests are drawn by seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import Any

from stages.environments.base_domain import hashed_split
from stages.environments.code.pieces import ALL, BRANCHES, CONDITIONS, CUTS, EACH, STEPS, WHICH, Piece
from stages.records.task import Split

ENTRY = "f"
FAMILIES = {"train": 16, "valid": 2, "test": 6}
"""Shares of the splits; generalising to new combinations takes many training ones."""
MISSING, UNBALANCED, NAMELESS = "forgotten", "bracket", "name"


@dataclass(frozen=True)
class Wording:
    """A problem with its constants filled in. `references`: (style, source); `mistakes`: (kind, source)."""

    parameters: tuple[str, ...]
    text: str
    signs: str
    """The same in operators, for models that do not know the words."""
    references: tuple[tuple[str, str], ...]
    mistakes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Family:
    """`kind`: list, number, choice or word. `pieces`: in order of application. `level`: number of operations, 1 to 3."""

    kind: str
    pieces: tuple[Piece, ...]
    level: int

    @property
    def name(self) -> str:
        return ":".join((self.kind, *(piece.name for piece in self.pieces)))

    @property
    def relatives(self) -> str:
        """A name shared by families that are the same functions with other constants: mirrored choices (a if a<5 else a+2 is
        a+2 if a>4 else a), sums of several steps, repeated products, quotients and remainders."""
        names = [piece.name for piece in self.pieces]
        if self.kind == "choice" and names[0] == "below":
            return ":".join(("choice", "above", names[2], names[1]))
        if self.kind == "number" and not self.two:
            if set(names) <= {"plus", "minus"}:
                return "number:plus"
            if len(set(names)) == 1:
                return f"number:{names[0]}"
        return self.name

    @property
    def split(self) -> Split:
        """The split whose tasks may use this family."""
        return hashed_split(FAMILIES, "code.families", self.relatives)

    def constants(self, rng: Random, largest: int = 9) -> list[int]:
        """One per piece, needed or not."""
        return [rng.randint(piece.smallest, min(piece.largest, largest)) for piece in self.pieces]

    def wording(self, constants: Sequence[int]) -> Wording:
        pieces = [filled(piece, constant) for piece, constant in zip(self.pieces, constants, strict=True)]
        return {"list": of_list, "number": of_number, "choice": of_choice, "word": of_word}[self.kind](*pieces)

    def inputs(self, constants: Sequence[int], rng: Random) -> list[Any]:
        """Arguments of one call; numbers are near the constants, where mistakes show."""
        if self.kind == "word":
            return ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(4, 6)))]
        near = [constant + shift for constant in constants for shift in (-1, 0, 1)]
        if self.kind == "list":
            return [[rng.choice([*near, rng.randint(1, 12)]) for _ in range(rng.randint(2, 4))]]
        return [rng.choice([*near, rng.randint(1, 20)]) for _ in range(2 if self.kind == "number" and self.two else 1)]

    @property
    def two(self) -> bool:
        """Whether the function has a second number, `b`, in place of the first step's constant."""
        return self.kind == "number" and self.pieces[0].name.endswith(" b")


def slips(expression: str) -> list[tuple[str, str]]:
    """Mistakes possible in any expression: a syntax error and an undefined name."""
    broken = expression[:-1] if expression[-1] in ")]" else f"({expression}"
    return [(UNBALANCED, broken), (NAMELESS, re.sub(r"\ba\b", "c", expression))]


def filled(piece: Piece, constant: int | str, name: str | None = None) -> Piece:
    """The piece with its constant in place (and under another name); `{v}` stays."""
    text = str(constant)
    mistakes = tuple((kind, code.replace("{k}", text)) for kind, code in piece.mistakes)
    return Piece(name or piece.name, piece.words.replace("{k}", text), piece.code.replace("{k}", text), mistakes)


def with_one_mistake(written: Callable[..., str], *pieces: Piece) -> list[tuple[str, str]]:
    """(kind, source) for every mistake in one of the pieces of a problem."""
    codes = [piece.code for piece in pieces]
    return [
        (kind, written(*codes[:place], code, *codes[place + 1 :]))
        for place, piece in enumerate(pieces)
        for kind, code in piece.mistakes
    ]


def of_list(which: Piece, each: Piece, whole: Piece) -> Wording:
    def written(which: str, each: str, whole: str) -> str:
        items = f"{each} for b in a" + (f" if {which}" if which else "")
        if each == "b" and not which:
            return whole.replace("[{v}]", "a").replace("{v}", "a")
        return whole.replace("{v}", items)

    expression = written(which.code, each.code, whole.code)
    chosen = f"filter(lambda b: {which.code}, a)" if which.code else "a"
    changed = f"map(lambda b: {each.code}, {chosen})" if each.code != "b" else chosen
    functional = whole.code.replace("[{v}]", f"list({changed})").replace("{v}", changed)
    inner = "    c.append(" + each.code + ")"
    loop = ["c = []", "for b in a:", *([f"    if {which.code}:", f"    {inner}"] if which.code else [inner])]
    loop.append("return " + whole.code.replace("[{v}]", "c").replace("{v}", "c"))
    steps = [
        f"c = {written(which.code, 'b', '[{v}]')}",
        "return " + written("", each.code, whole.code).replace("in a", "in c").replace("(a)", "(c)"),
    ]
    mistakes = with_one_mistake(written, which, each, whole)
    if which.code:
        mistakes.append((MISSING, written("", each.code, whole.code)))
    if each.code != "b":
        mistakes.append((MISSING, written(which.code, "b", whole.code)))
    references = [("expression", expression), ("loop", "\n".join(loop)), ("functional", functional)]
    if which.code and (each.code != "b" or whole.name != "list"):
        references.append(("steps", "\n".join(steps).replace("return a", "return c")))
    text = f"{whole.words}{each.words}the numbers in a{which.words}"
    condition = f" for {which.code}" if which.code else ""
    return Wording(("a",), text, f"{whole.name} of {each.code}{condition}", tuple(references), (*mistakes, *slips(expression)))


def chained(codes: Sequence[str]) -> str:
    """The operations nested in one expression, with brackets where they are needed."""
    expression = "a"
    for code in codes:
        open_ended = re.search(r"[-+*/%]", re.sub(r"\[.*?\]|'.*?'", "", expression))
        expression = code.replace("{v}", f"({expression})" if open_ended and "({v})" not in code else expression)
    return expression


def one_changed(pieces: Sequence[Piece], codes: Sequence[str]) -> list[tuple[str, str]]:
    """Chains with one operation mistaken or left out, or two operations swapped."""
    found = []
    for number, piece in enumerate(pieces):
        for kind, code in piece.mistakes:
            found.append((kind, chained([*codes[:number], code, *codes[number + 1 :]])))
        if len(codes) > 1:
            found.append((MISSING, chained([*codes[:number], *codes[number + 1 :]])))
    if len(codes) > 1:
        found.append(("order", chained([*codes[1:], codes[0]])))
    return found


def of_number(*pieces: Piece) -> Wording:
    return of_chain(pieces, "a ", ("a", "b") if any("b" in piece.code for piece in pieces) else ("a",))


def of_word(*pieces: Piece) -> Wording:
    return of_chain(pieces, "the word a: ", ("a",))


def of_chain(pieces: Sequence[Piece], operand: str, parameters: tuple[str, ...]) -> Wording:
    """One operation after another on `operand`."""
    codes = [piece.code for piece in pieces]
    expression = chained(codes)
    lines = [f"c = {code.replace('{v}', 'c')}" for code in codes]
    references = [("expression", expression), ("loop", "\n".join(["c = a", *lines, "return c"]))]
    if len(codes) > 1:
        steps = [f"c = {codes[0].replace('{v}', 'a')}", *lines[1:-1], "return " + lines[-1].removeprefix("c = ")]
        references.append(("steps", "\n".join(steps)))
    signs = ", ".join(["a", *(code.replace("{v}", "") for code in codes)])
    text = operand + ", then ".join(piece.words for piece in pieces)
    return Wording(parameters, text, signs, tuple(references), (*one_changed(pieces, codes), *slips(expression)))


def of_choice(condition: Piece, then: Piece, other: Piece) -> Wording:
    def written(condition: str, then: str, other: str) -> str:
        return f"{then} if {condition} else {other}"

    expression = written(condition.code, then.code, other.code)
    loop = f"if {condition.code}:\n    return {then.code}\nreturn {other.code}"
    steps = f"c = {other.code}\nif {condition.code}:\n    c = {then.code}\nreturn c"
    mistakes = with_one_mistake(written, condition, then, other)
    mistakes += [("order", written(condition.code, other.code, then.code)), ("else", f"{then.code} if {condition.code}")]
    mistakes += slips(expression)
    references = (("expression", expression), ("loop", loop), ("steps", steps))
    text = f"{then.words} if a is {condition.words}, else {other.words}"
    return Wording(("a",), text, f"{condition.code}, {then.code}, {other.code}", references, tuple(mistakes))


@cache
def families() -> dict[str, Family]:
    """All families by name, in a fixed order."""
    found = []
    for which, each, whole in product(WHICH, EACH, ALL):
        level = (which.name != "all") + (each.name != "same") + (whole.name != "list")
        if level and not (whole.name == "count" and (each.name != "same" or which.name == "all")):
            found.append(Family("list", (which, each, whole), level))
    firsts = [*STEPS, *(filled(step, "b", f"{step.name} b") for step in STEPS)]
    found += [Family("number", (first,), 1) for first in firsts]
    found += [Family("number", (first, second), 2) for first, second in product(firsts, STEPS)]
    found += [Family("word", (cut,), 1) for cut in CUTS]
    found += [Family("word", pair, 2) for pair in product(CUTS, CUTS) if pair[0] != pair[1]]
    found += [
        Family("choice", (condition, then, other), 3)
        for condition, then, other in product(CONDITIONS, BRANCHES, BRANCHES)
        if then != other
    ]
    return {family.name: family for family in found}
