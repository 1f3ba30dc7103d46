"""Operators that turn a valid value, text or sequence of bytes into a hostile one. Each takes a random generator and leaves its
input unchanged, so that (seed, number) identifies a case."""

from __future__ import annotations

import copy
import datetime
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[Any, ...]
Operator = Callable[[random.Random, Any], Any]

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 255, 10**6, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-320, 5e-324, 1e-12, 1e12, 1e308, -1e308, math.inf, -math.inf, math.nan),
)
TEXTS: tuple[str, ...] = (
    *(
        "",
        " ",
        "\n",
        "x",
        "0",
        "1",
        "true",
        "null",
        "none",
        "a\x00b",
        "\x1b[2J",
        "\ufeff",
        "\u202e abc",
        "é\u0301",
        "👩‍👩‍👧",
        "\ud800",
    ),
    *("../../etc/passwd", "/etc/passwd", "a/b", "~", "${HOME}", "{0}", "%s%n", "'; --", "<script>", "<|end|>", "\\", "%"),
    *("word " * 500, "x" * 70_000),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": ""}, {"a": {"b": [1]}})
YAML_ONLY: tuple[Any, ...] = (datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 1, 2, 3), b"\xff\x00", {1, 2}, {None: 1})
"""Values of YAML that JSON does not have."""


def paths(value: Any, start: Path = ()) -> Iterator[Path]:
    """Paths of all values inside `value`, beginning with `start` itself."""
    yield start
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in items:
        yield from paths(held, (*start, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: Path, new: Any) -> Any:
    """A copy of `value` with `new` at `path`."""
    if not path:
        return new
    changed = copy.deepcopy(value)
    at(changed, path[:-1])[path[-1]] = new
    return changed


def random_path(rng: random.Random, value: Any, kind: type | tuple[type, ...] = object) -> Path | None:
    """Random path of a value of `kind`, below the root if there is one."""
    found = [path for path in paths(value) if isinstance(at(value, path), kind)]
    return rng.choice([path for path in found if path] or found or [None])


def nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


# ---- values ----------------------------------------------------------------------------------------------------------


def replaced(rng: random.Random, value: Any, pool: tuple[Any, ...] = (*NUMBERS, *TEXTS, *OTHERS)) -> Any:
    return put(value, random_path(rng, value) or (), copy.deepcopy(rng.choice(pool)))


def leaf_replaced(rng: random.Random, value: Any) -> Any:
    path = random_path(rng, value, (int, float, str, type(None)))
    return value if path is None else put(value, path, copy.deepcopy(rng.choice((*NUMBERS, *TEXTS, *OTHERS))))


def number_moved(rng: random.Random, value: Any) -> Any:
    path = random_path(rng, value, (int, float))
    if path is None:
        return value
    number = at(value, path)
    change = rng.choice((lambda x: x + 1, lambda x: x - 1, lambda x: -x, lambda x: x * 10, lambda x: x / 10, lambda x: x * 10**9))
    return put(value, path, change(number))


def of_another_type(rng: random.Random, value: Any) -> Any:
    path = random_path(rng, value, (int, float, str))
    if path is None:
        return value
    held = at(value, path)
    return put(value, path, rng.choice(([held], {"value": held}, str(held), {str(held): held}, [held, held])))


def swapped(rng: random.Random, value: Any) -> Any:
    one, other = random_path(rng, value), random_path(rng, value)
    if one is None or other is None or one[: len(other)] == other or other[: len(one)] == one:
        return value
    return put(put(value, one, at(value, other)), other, copy.deepcopy(at(value, one)))


def deepened(rng: random.Random, value: Any) -> Any:
    return put(value, random_path(rng, value) or (), nested(rng.choice((3, 60, 150)), rng.choice(("list", "dict"))))


def text_mangled(rng: random.Random, value: Any) -> Any:
    path = random_path(rng, value, str)
    if path is None:
        return value
    text = at(value, path)
    where = rng.randrange(len(text) + 1)
    piece = rng.choice((*TEXTS[:-2], text, text[:where]))
    return put(
        value, path, rng.choice((text[:where] + piece + text[where:], text[:where], text[where:], text.upper(), text[::-1]))
    )


# ---- keys ------------------------------------------------------------------------------------------------------------


def typo(rng: random.Random, name: str) -> str:
    """A misspelt `name`."""
    where = rng.randrange(len(name)) if name else 0
    return rng.choice(
        (name[:where] + name[where + 1 :], name[:where] + name[where : where + 1] + name[where:], name + "s", f" {name}")
    )


def _mapping(rng: random.Random, value: Any) -> Path | None:
    found = [path for path in paths(value) if isinstance(at(value, path), dict) and at(value, path)]
    return rng.choice(found) if found else None


def key_renamed(rng: random.Random, value: Any) -> Any:
    path = _mapping(rng, value)
    if path is None:
        return value
    held = at(value, path)
    old = rng.choice(list(held))
    new = rng.choice((typo(rng, str(old)), str(old).upper(), rng.choice(TEXTS[:-2])))
    return put(value, path, {new if key == old else key: item for key, item in held.items()})


def key_added(rng: random.Random, value: Any) -> Any:
    path = _mapping(rng, value)
    if path is None:
        return value
    held = at(value, path)
    name = rng.choice(
        (typo(rng, str(rng.choice(list(held)))), "unknown", "__class__", "__init__", "model_config", "self", *TEXTS[:6])
    )
    return put(value, path, {**held, name: rng.choice((*NUMBERS[:3], *TEXTS[:4], *OTHERS))})


def key_dropped(rng: random.Random, value: Any) -> Any:
    path = _mapping(rng, value)
    if path is None:
        return value
    held = dict(at(value, path))
    del held[rng.choice(list(held))]
    return put(value, path, held)


def items_changed(rng: random.Random, value: Any) -> Any:
    """A list with an item repeated or removed, or in another order."""
    path = random_path(rng, value, list)
    if path is None or not at(value, path):
        return value
    held = list(at(value, path))
    where = rng.randrange(len(held))
    change = rng.choice(("drop", "double", "shuffle", "many"))
    if change == "shuffle":
        rng.shuffle(held)
    else:
        held[where : where + 1] = [held[where]] * {"drop": 0, "double": 2, "many": 500}[change]
    return put(value, path, held)


VALUES: tuple[Operator, ...] = (
    replaced,
    leaf_replaced,
    number_moved,
    of_another_type,
    swapped,
    deepened,
    text_mangled,
    items_changed,
)
KEYS: tuple[Operator, ...] = (key_renamed, key_added, key_dropped)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bit_flipped(rng: random.Random, text: bytes) -> bytes:
    where = rng.randrange(len(text))
    return text[:where] + bytes([text[where] ^ (1 << rng.randrange(8))]) + text[where + 1 :]


def slice_dropped(rng: random.Random, text: bytes) -> bytes:
    where = rng.randrange(len(text))
    return text[:where] + text[where + rng.choice((1, 2, 5, 40)) :]


def slice_repeated(rng: random.Random, text: bytes) -> bytes:
    where, length = rng.randrange(len(text)), rng.choice((1, 3, 20, 200))
    return text[:where] + text[where : where + length] * rng.choice((2, 3, 50)) + text[where + length :]


def cut_short(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randrange(len(text))]


def bytes_inserted(rng: random.Random, text: bytes) -> bytes:
    where = rng.randrange(len(text))
    what = rng.choice(
        (b"\xff", b"\x00", b"\xed\xa0\x80", b"\xc0\xaf", b"\xef\xbb\xbf", b"\r", b"\t", b"\x85", b"\xe2\x80\xa8", b"\x1f")
    )
    return text[:where] + what + text[where:]


def lines_swapped(rng: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def recoded(rng: random.Random, text: bytes) -> bytes:
    return text.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")))


BYTES: tuple[Operator, ...] = (bit_flipped, slice_dropped, slice_repeated, cut_short, bytes_inserted, lines_swapped, recoded)

NUMERALS = (
    b"9" * 5000,
    b"1e999",
    b"-1e999",
    b"NaN",
    b"Infinity",
    b"-0",
    b"00",
    b"1" + b"0" * 400,
    b"0x10",
    b"1_000",
    b"+1",
    b".5",
)
JSON_SPLICES = (
    *(
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 3000 + b"]" * 3000,
        b'"\\ud800"',
        b'"\\udfff\\ud800"',
        b'"\\u0000"',
        b"null",
        b"true",
    ),
    *NUMERALS,
)
"""Replacements for values in JSON text."""


def json_value_spliced(rng: random.Random, text: bytes) -> bytes:
    """Replace what follows a colon, up to the next comma or bracket."""
    colons = [place for place, byte in enumerate(text) if byte == ord(":")]
    if not colons:
        return text
    where = rng.choice(colons) + 1
    end = min((place for place in (text.find(mark, where) for mark in (b",", b"}", b"]")) if place >= 0), default=len(text))
    return text[:where] + rng.choice(JSON_SPLICES) + text[end:]


def key_doubled(rng: random.Random, text: bytes) -> bytes:
    """Repeat an object's first key, with another value."""
    where = text.find(b"{") + 1
    colon = text.find(b":", where)
    return (
        text[:where] + text[where:colon] + b": " + rng.choice((b"null", b"1", b'"x"')) + b", " + text[where:]
        if colon > 0
        else text
    )


JSON_BYTES: tuple[Operator, ...] = (*BYTES, json_value_spliced, json_value_spliced, key_doubled)


def mutated(rng: random.Random, value: Any, operators: tuple[Operator, ...], most: int = 3) -> tuple[Any, str]:
    """`value` after one to `most` of `operators`, and their names."""
    names = []
    for _ in range(rng.randint(1, most)):
        operator = rng.choice(operators)
        if value == b"":  # an earlier operator left nothing to change
            break
        value = operator(rng, value)
        names.append(operator.__name__)
    return value, "+".join(names)
