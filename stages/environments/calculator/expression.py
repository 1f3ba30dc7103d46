"""Arithmetic expressions over whole numbers with +, - and *: read, written, evaluated, simplified. Nothing is ever executed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

OPERATORS = ("+", "-", "*")
MAX_CHARACTERS = 200
MAX_DIGITS = 18
_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_APPLY: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class Operation:
    operator: str
    left: Expression
    right: Expression


Expression: TypeAlias = int | Operation


def parse(text: str) -> Expression:
    """The expression that `text` writes. Raises ValueError, saying what is wrong, for anything but +, -, * and whole numbers."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters, and this one {len(text)}")
    try:
        return _read(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"'{text}' is not an expression ({error.msg})") from error


def _read(node: ast.expr) -> Expression:
    if isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
        return Operation(_SYMBOLS[type(node.op)], _read(node.left), _read(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        inner = _read(node.operand)
        assert isinstance(inner, int)
        return -inner
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**MAX_DIGITS:
        return node.value
    raise ValueError(f"an expression holds whole numbers of at most {MAX_DIGITS} digits, {', '.join(OPERATORS)} and brackets")


def write(expression: Expression) -> str:
    """As text, with the brackets that are needed: (47+38)*2-12."""
    if isinstance(expression, int):
        return str(expression) if expression >= 0 else f"({expression})"
    left, right = write(expression.left), write(expression.right)
    if expression.operator == "*" and _is_sum(expression.left):
        left = f"({left})"
    if isinstance(expression.right, Operation) and (expression.operator == "*" or _is_sum(expression.right)):
        right = f"({right})"
    return f"{left}{expression.operator}{right}"


def _is_sum(expression: Expression) -> bool:
    return isinstance(expression, Operation) and expression.operator != "*"


def apply(operator: str, left: int, right: int) -> int:
    return _APPLY[operator](left, right)


def value(expression: Expression) -> int:
    if isinstance(expression, int):
        return expression
    return apply(expression.operator, value(expression.left), value(expression.right))


def canonical(expression: Expression) -> str:
    """The same text for expressions that differ by the order of terms under one + or * alone."""
    if isinstance(expression, int):
        return str(expression)
    sides = [canonical(expression.left), canonical(expression.right)]
    if expression.operator != "-":
        sides.sort()
    return f"({sides[0]}{expression.operator}{sides[1]})"


def at_sight(operator: str, left: int, right: int) -> int | None:
    """The result of an operation that needs no computing: x+0, 0+x, x-0, x-x, x*1, 1*x, x*0, 0*x; None for any other."""
    neutral = 1 if operator == "*" else 0
    absorbed = operator == "*" and 0 in (left, right)
    swapped = operator != "-" and left == neutral
    if right == neutral or absorbed or swapped or (operator == "-" and left == right):
        return apply(operator, left, right)
    return None


def operations(expression: Expression) -> Iterator[tuple[str, int, int]]:
    """(operator, left value, right value) of each operation, innermost and leftmost first: the order of working it out."""
    if isinstance(expression, Operation):
        yield from operations(expression.left)
        yield from operations(expression.right)
        yield expression.operator, value(expression.left), value(expression.right)


def needed(expression: Expression) -> list[str]:
    """The operations, written out, that can't be read off: what the tool is for, in order, each once."""
    return list(dict.fromkeys(_written(*one) for one in operations(expression) if at_sight(*one) is None))


def _written(operator: str, left: int, right: int) -> str:
    return write(Operation(operator, left, right))


def simplify(expression: Expression, known: Mapping[str, int]) -> Expression:
    """`expression` with what is `known` (written operation -> result), or can be read off, put in."""
    if isinstance(expression, int):
        return expression
    left, right = simplify(expression.left, known), simplify(expression.right, known)
    if isinstance(left, int) and isinstance(right, int):
        seen = at_sight(expression.operator, left, right)
        found = known.get(_written(expression.operator, left, right)) if seen is None else seen
        if found is not None:
            return found
    return Operation(expression.operator, left, right)


def next_operation(expression: Expression) -> str | None:
    """The innermost, leftmost operation of a simplified expression; None for a number."""
    if isinstance(expression, int):
        return None
    return next_operation(expression.left) or next_operation(expression.right) or write(expression)
