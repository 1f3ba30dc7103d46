"""Families of problems: which pieces come together. A family belongs to one split; its constants and tests are drawn by seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import Any

from stages.environments.code.pieces import ALL, BRANCHES, CONDITIONS, CUTS, EACH, STEPS, WHICH, Piece
from stages.records.task import SPLITS, Split
from stages.seeding import key64

ENTRY = "f"
STYLES = ("expression", "loop", "functional", "steps")
"""An expression (a comprehension); a body with a loop or branches; with map and filter; with a name for what comes between."""
FAMILIES = {"train": 16, "valid": 2, "test": 6}
"""Shares of the splits in the families. What comes together anew is learnt from many that came together before."""
MISSING, UNBALANCED, NAMELESS = "forgotten", "bracket", "name"


@dataclass(frozen=True)
class Wording:
    """A problem with its constants filled in. `references`: (style, source); `mistakes`: (kind, source)."""

    parameters: tuple[str, ...]
    text: str
    signs: str
    """The same in signs, what is to be copied next to what it belongs to: for models that do not know the words."""
    references: tuple[tuple[str, str], ...]
    mistakes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Family:
    """`kind`: list, number, choice or word. `pieces` in the order in which they are applied."""

    kind: str
    pieces: tuple[Piece, ...]
    level: int
    """How many operations there are: 1, 2 or 3."""

    @property
    def name(self) -> str:
        return ":".join((self.kind, *(piece.name for piece in self.pieces)))

    @property
    def relatives(self) -> str:
        """A name that families share which solve each other's problems with other constants: mirrored choices (a if a<5 else a+2
        is a+2 if a>4 else a), sums of several steps, products, quotients and remainders of remainders."""
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
        """The split whose problems may be of this family."""
        place = key64("code.families", self.relatives) % sum(FAMILIES.values())
        for split in SPLITS:
            place -= FAMILIES[split]
            if place < 0:
                return split
        raise AssertionError("shares add up to their sum")

    def constants(self, rng: Random, largest: int = 9) -> list[int]:
        """One for each piece, whether it needs one or not."""
        return [rng.randint(piece.smallest, min(piece.largest, largest)) for piece in self.pieces]

    def wording(self, constants: Sequence[int]) -> Wording:
        return {"list": of_list, "number": of_number, "choice": of_choice, "word": of_word}[self.kind](self.pieces, constants)

    def inputs(self, constants: Sequence[int], rng: Random) -> list[Any]:
        """Arguments of one call. Numbers keep near the constants, where mistakes show."""
        if self.kind == "word":
            return ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(4, 6)))]
        near = [constant + shift for constant in constants for shift in (-1, 0, 1)]
        if self.kind == "list":
            return [[rng.choice([*near, rng.randint(1, 12)]) for _ in range(rng.randint(2, 4))]]
        return [rng.choice([*near, rng.randint(1, 20)]) for _ in range(2 if self.kind == "number" and self.two else 1)]

    @property
    def two(self) -> bool:
        """Whether a number's first step takes the other number in place of a constant."""
        return self.kind == "number" and self.pieces[0].name.endswith(" b")


def slips(expression: str) -> list[tuple[str, str]]:
    """Mistakes that can be made in any expression: it does not compile, or names something that is not there."""
    broken = expression[:-1] if expression[-1] in ")]" else f"({expression}"
    return [(UNBALANCED, broken), (NAMELESS, re.sub(r"\ba\b", "c", expression))]


def filled(piece: Piece, constant: int) -> Piece:
    """With the constant in place; `{v}` stays."""
    text = str(constant)
    mistakes = tuple((kind, code.replace("{k}", text)) for kind, code in piece.mistakes)
    return Piece(piece.name, piece.words.replace("{k}", text), piece.code.replace("{k}", text), mistakes)


def of_list(pieces: Sequence[Piece], constants: Sequence[int]) -> Wording:
    which, each, whole = (filled(piece, constant) for piece, constant in zip(pieces, constants, strict=True))

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
    kept = written(which.code, "b", "[{v}]")
    steps = [f"c = {kept}", "return " + written("", each.code, whole.code).replace("in a", "in c").replace("(a)", "(c)")]
    mistakes = [(kind, written(code, each.code, whole.code)) for kind, code in which.mistakes]
    mistakes += [(kind, written(which.code, code, whole.code)) for kind, code in each.mistakes]
    mistakes += [(kind, written(which.code, each.code, code)) for kind, code in whole.mistakes]
    if which.code:
        mistakes.append((MISSING, written("", each.code, whole.code)))
    if each.code != "b":
        mistakes.append((MISSING, written(which.code, "b", whole.code)))
    references = [("expression", expression), ("loop", "\n".join(loop)), ("functional", functional)]
    if which.code and (each.code != "b" or whole.name != "list"):
        references.append(("steps", "\n".join(steps).replace("return a", "return c")))
    text = f"{whole.words}{each.words}the numbers in a{which.words}"
    asked = f" for {which.code}" if which.code else ""
    return Wording(("a",), text, f"{whole.name} of {each.code}{asked}", tuple(references), (*mistakes, *slips(expression)))


def chained(codes: Sequence[str]) -> str:
    """The operations one in the other, in brackets where the inner one binds less."""
    expression = "a"
    for code in codes:
        open_ended = re.search(r"[-+*/%]", re.sub(r"\[.*?\]|'.*?'", "", expression))
        expression = code.replace("{v}", f"({expression})" if open_ended and "({v})" not in code else expression)
    return expression


def in_signs(codes: Sequence[str]) -> str:
    """ "a, *4, -2"."""
    return ", ".join(["a", *(code.replace("{v}", "") for code in codes)])


def in_steps(codes: Sequence[str]) -> str:
    """A line for each operation."""
    lines = [f"c = {codes[0].replace('{v}', 'a')}", *(f"c = {code.replace('{v}', 'c')}" for code in codes[1:])]
    return "\n".join([*lines[:-1], "return " + lines[-1].removeprefix("c = ")])


def in_place(codes: Sequence[str]) -> str:
    """A name that every operation changes."""
    return "\n".join(["c = a", *(f"c = {code.replace('{v}', 'c')}" for code in codes), "return c"])


def one_changed(pieces: Sequence[Piece], whole: Sequence[str]) -> list[tuple[str, str]]:
    """Chains in which one operation is mistaken, or left out, or two have changed places."""
    found = []
    for number, piece in enumerate(pieces):
        for kind, code in piece.mistakes:
            found.append((kind, chained([*whole[:number], code, *whole[number + 1 :]])))
        if len(whole) > 1:
            found.append((MISSING, chained([*whole[:number], *whole[number + 1 :]])))
    if len(whole) > 1:
        found.append(("order", chained([*whole[1:], whole[0]])))
    return found


def of_number(pieces: Sequence[Piece], constants: Sequence[int]) -> Wording:
    given = [filled(piece, constant) for piece, constant in zip(pieces, constants, strict=True)]
    codes = [piece.code for piece in given]
    expression = chained(codes)
    parameters = ("a", "b") if any("b" in code for code in codes) else ("a",)
    references = [("expression", expression), ("loop", in_place(codes))]
    if len(codes) > 1:
        references.append(("steps", in_steps(codes)))
    text = "a " + ", then ".join(piece.words for piece in given)
    return Wording(parameters, text, in_signs(codes), tuple(references), (*one_changed(given, codes), *slips(expression)))


def of_word(pieces: Sequence[Piece], constants: Sequence[int]) -> Wording:
    given = [filled(piece, constant) for piece, constant in zip(pieces, constants, strict=True)]
    codes = [piece.code for piece in given]
    expression = chained(codes)
    references = [("expression", expression), ("loop", in_place(codes))]
    if len(codes) > 1:
        references.append(("steps", in_steps(codes)))
    text = "the word a: " + ", then ".join(piece.words for piece in given)
    return Wording(("a",), text, in_signs(codes), tuple(references), (*one_changed(given, codes), *slips(expression)))


def of_choice(pieces: Sequence[Piece], constants: Sequence[int]) -> Wording:
    condition, then, other = (filled(piece, constant) for piece, constant in zip(pieces, constants, strict=True))

    def written(condition: str, then: str, other: str) -> str:
        return f"{then} if {condition} else {other}"

    expression = written(condition.code, then.code, other.code)
    loop = f"if {condition.code}:\n    return {then.code}\nreturn {other.code}"
    steps = f"c = {other.code}\nif {condition.code}:\n    c = {then.code}\nreturn c"
    mistakes = [(kind, written(code, then.code, other.code)) for kind, code in condition.mistakes]
    mistakes += [(kind, written(condition.code, code, other.code)) for kind, code in then.mistakes]
    mistakes += [(kind, written(condition.code, then.code, code)) for kind, code in other.mistakes]
    mistakes += [("order", written(condition.code, other.code, then.code)), ("else", f"{then.code} if {condition.code}")]
    mistakes += slips(expression)
    references = (("expression", expression), ("loop", loop), ("steps", steps))
    text = f"{then.words} if a is {condition.words}, else {other.words}"
    return Wording(("a",), text, f"{condition.code}, {then.code}, {other.code}", references, tuple(mistakes))


def _with_b(piece: Piece) -> Piece:
    """A step with the other number in place of a constant."""
    mistakes = tuple((kind, code.replace("{k}", "b")) for kind, code in piece.mistakes)
    return Piece(f"{piece.name} b", piece.words.replace("{k}", "b"), piece.code.replace("{k}", "b"), mistakes)


@cache
def families() -> dict[str, Family]:
    """All of them, by name, in a fixed order."""
    found = []
    for which, each, whole in product(WHICH, EACH, ALL):
        level = (which.name != "all") + (each.name != "same") + (whole.name != "list")
        if level and not (whole.name == "count" and (each.name != "same" or which.name == "all")):
            found.append(Family("list", (which, each, whole), level))
    firsts = [*STEPS, *map(_with_b, STEPS)]
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
