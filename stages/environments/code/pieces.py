"""The operations that problems combine: their wording, their Python and typical mistakes.

`{v}` is the operand of an operation and `{k}` its constant. Every piece occurs in problems of every split; a combination of
pieces (a family) belongs to one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One operation. `mistakes`: (kind, wrong code)."""

    name: str
    words: str
    code: str
    mistakes: tuple[tuple[str, str], ...] = ()
    smallest: int = 2
    largest: int = 9
    """Range of its constant."""


# Problems about the numbers in a list: a filter, a mapping and an aggregate.
WHICH = (
    Piece("all", "", ""),
    Piece("above", " above {k}", "b>{k}", (("boundary", "b>={k}"), ("direction", "b<{k}"))),
    Piece("below", " below {k}", "b<{k}", (("boundary", "b<={k}"), ("direction", "b>{k}"))),
    Piece("multiples", " that are multiples of {k}", "b%{k}==0", (("negation", "b%{k}"), ("operator", "b//{k}==0")), 2, 4),
    Piece("rest", " that are not multiples of {k}", "b%{k}>0", (("negation", "b%{k}==0"), ("boundary", "b%{k}>1")), 2, 4),
    Piece("others", " other than {k}", "b!={k}", (("negation", "b=={k}"), ("direction", "b>{k}"))),
)
EACH = (
    Piece("same", "", "b"),
    Piece("square", "the squares of ", "b*b", (("operator", "b*2"), ("operator", "b+b"))),
    Piece("times", "{k} times ", "b*{k}", (("operator", "b+{k}"), ("power", "b**{k}"))),
    Piece("plus", "{k} plus ", "b+{k}", (("operator", "b*{k}"), ("sign", "b-{k}"))),
    Piece("less", "{k} less than ", "b-{k}", (("order", "{k}-b"), ("sign", "b+{k}"))),
    Piece("remainder", "the remainders by {k} of ", "b%{k}", (("operator", "b//{k}"), ("order", "{k}%b"))),
)
ALL = (
    Piece("sum", "the sum of ", "sum({v})", (("function", "len([{v}])"), ("method", "a.sum()"))),
    Piece("list", "a list of ", "[{v}]", (("kind", "({v})"), ("order", "[{v}][::-1]"))),
    Piece("count", "how many are ", "len([{v}])", (("kind", "len({v})"), ("function", "sum({v})"))),
    Piece("largest", "the largest of ", "max({v})", (("function", "min({v})"), ("method", "a.max()"))),
    Piece("smallest", "the smallest of ", "min({v})", (("function", "max({v})"), ("method", "a.min()"))),
    Piece("sorted", "in order ", "sorted({v})", (("forgotten", "[{v}]"), ("method", "[{v}].sort()"))),
)

# Problems about numbers: a chain of steps with the other number or a constant.
STEPS = (
    Piece("plus", "plus {k}", "{v}+{k}", (("sign", "{v}-{k}"), ("operator", "{v}*{k}"))),
    Piece("minus", "minus {k}", "{v}-{k}", (("order", "{k}-{v}"), ("sign", "{v}+{k}"))),
    Piece("times", "times {k}", "{v}*{k}", (("operator", "{v}+{k}"), ("power", "{v}**{k}"))),
    Piece("over", "divided by {k}, rounded down", "{v}//{k}", (("operator", "{v}%{k}"), ("kind", "{v}/{k}"))),
    Piece("remainder", "modulo {k}", "{v}%{k}", (("operator", "{v}//{k}"), ("order", "{k}%{v}"))),
)

# Problems with a condition on a number.
CONDITIONS = (
    Piece("above", "above {k}", "a>{k}", (("boundary", "a>={k}"), ("direction", "a<{k}"))),
    Piece("below", "below {k}", "a<{k}", (("boundary", "a<={k}"), ("direction", "a>{k}"))),
    Piece("multiple", "a multiple of {k}", "a%{k}==0", (("negation", "a%{k}"), ("assignment", "a%{k}=0")), 2, 4),
)
BRANCHES = (
    Piece("plus", "a plus {k}", "a+{k}", (("sign", "a-{k}"),)),
    Piece("times", "a times {k}", "a*{k}", (("operator", "a+{k}"),)),
    Piece("less", "a minus {k}", "a-{k}", (("order", "{k}-a"),)),
    Piece("itself", "a", "a", (("sign", "-a"),)),
    Piece("constant", "{k}", "{k}", (("operator", "a*{k}"),)),
)

# Problems about a word: a chain of steps.
CUTS = (
    Piece("first", "the first {k} letters", "{v}[:{k}]", (("index", "{v}[{k}]"), ("direction", "{v}[{k}:]")), 2, 3),
    Piece("last", "the last {k} letters", "{v}[-{k}:]", (("index", "{v}[-{k}]"), ("direction", "{v}[:-{k}]")), 2, 3),
    Piece("drop", "all but the first {k} letters", "{v}[{k}:]", (("boundary", "{v}[{k}+1:]"), ("direction", "{v}[:{k}]")), 2, 3),
    Piece("cut", "all but the last {k} letters", "{v}[:-{k}]", (("direction", "{v}[-{k}:]"), ("sign", "{v}[:{k}]")), 2, 3),
    Piece("reverse", "reversed", "{v}[::-1]", (("method", "{v}.reverse()"), ("sign", "{v}[::1]"))),
    Piece("upper", "in capitals", "{v}.upper()", (("method", "{v}.lower()"), ("call", "{v}.upper"))),
    Piece("dashes", "with dashes between letters", "'-'.join({v})", (("method", "{v}.join('-')"), ("operator", "{v}+'-'"))),
    Piece("other", "every other letter", "{v}[::2]", (("index", "{v}[2]"), ("boundary", "{v}[1::2]"))),
)
