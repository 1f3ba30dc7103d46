"""Arithmetic expressions over integers with +, - and *: parsed, formatted, evaluated, simplified; never executed."""

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
    """The expression in `text`. Raises ValueError, saying what is wrong, for anything but +, -, * and integers."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters, not {len(text)}")
    try:
        return _read(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"'{text}' is not an expression ({error.msg})") from error


def _read(node: ast.expr) -> Expression:
    if isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
        return Operation(_SYMBOLS[type(node.op)], _read(node.left), _read(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -_read(node.operand)  # type: ignore[operator]  # a constant
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**MAX_DIGITS:
        return node.value
    raise ValueError(f"an expression has only whole numbers of at most {MAX_DIGITS} digits, {', '.join(OPERATORS)} and brackets")


def write(expression: Expression) -> str:
    """As text with the fewest brackets: (47+38)*2-12."""
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
    """The same text for expressions that differ only in the order of operands of + or *."""
    if isinstance(expression, int):
        return str(expression)
    sides = [canonical(expression.left), canonical(expression.right)]
    if expression.operator != "-":
        sides.sort()
    return f"({sides[0]}{expression.operator}{sides[1]})"


def trivial_result(operator: str, left: int, right: int) -> int | None:
    """The result of a trivial operation: x+0, 0+x, x-0, x-x, x*1, 1*x, x*0, 0*x; None for any other."""
    neutral = 1 if operator == "*" else 0
    absorbed = operator == "*" and 0 in (left, right)
    swapped = operator != "-" and left == neutral
    if right == neutral or absorbed or swapped or (operator == "-" and left == right):
        return apply(operator, left, right)
    return None


def operations(expression: Expression) -> Iterator[tuple[str, int, int]]:
    """(operator, left value, right value) of each operation in evaluation order: innermost and leftmost first."""
    if isinstance(expression, Operation):
        yield from operations(expression.left)
        yield from operations(expression.right)
        yield expression.operator, value(expression.left), value(expression.right)


def needed(expression: Expression) -> list[str]:
    """The non-trivial operations as text, in evaluation order, each once: those that need the tool."""
    return list(dict.fromkeys(_written(*one) for one in operations(expression) if trivial_result(*one) is None))


def _written(operator: str, left: int, right: int) -> str:
    return write(Operation(operator, left, right))


def simplify(expression: Expression, known: Mapping[str, int]) -> Expression:
    """`expression` with trivial operations and `known` ones (text -> result) replaced by their results."""
    if isinstance(expression, int):
        return expression
    left, right = simplify(expression.left, known), simplify(expression.right, known)
    if isinstance(left, int) and isinstance(right, int):
        result = trivial_result(expression.operator, left, right)
        if result is None:
            result = known.get(_written(expression.operator, left, right))
        if result is not None:
            return result
    return Operation(expression.operator, left, right)


def next_operation(expression: Expression) -> str | None:
    """The operation of a simplified expression to evaluate next; None for a number."""
    if isinstance(expression, int):
        return None
    return next_operation(expression.left) or next_operation(expression.right) or write(expression)
