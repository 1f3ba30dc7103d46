"""Finds duplicate problems: by their solutions up to names and constants, and by their descriptions."""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap

WORDS = 13
"""Length of word n-grams that two descriptions do not share by chance."""
_BUILTIN = frozenset(("sum", "len", "max", "min", "sorted", "list", "map", "filter", "set", "dict", "range", "int", "str"))


class _Anonymize(ast.NodeTransformer):
    """Renames variables by order of appearance (built-in functions keep their names), replaces constants by their types unless
    `keep_constants`, and removes docstrings and annotations."""

    def __init__(self, parameters: tuple[str, ...], keep_constants: bool = False) -> None:
        self.names: dict[str, str] = {name: name for name in sorted(_BUILTIN)}
        self.names.update({name: f"parameter{number}" for number, name in enumerate(parameters)})
        self.keep_constants = keep_constants

    def _name(self, name: str) -> str:
        return self.names.setdefault(name, f"n{len(self.names)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._name(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self._name(node.arg), None)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return node if self.keep_constants else ast.Constant(type(node.value).__name__)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._name(node.name)
        node.returns = None
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)


def fingerprint(source: str, parameters: tuple[str, ...] = ()) -> str:
    """16 hex digits, equal for solutions that differ only in names (except built-in functions), constants, comments and layout.
    `source`: a module, or the body or expression of a function of `parameters`. Raises SyntaxError."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        tree = ast.parse(f"def f({', '.join(parameters)}):\n" + textwrap.indent(source, "    "))
    anonymize = _Anonymize(_names(parameters))
    body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    text = "\n".join(ast.dump(anonymize.visit(node)) for node in body)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _names(parameters: tuple[str, ...]) -> tuple[str, ...]:
    """The names in parts of a signature, such as "a, b=2"."""
    (function,) = ast.parse(f"def f({', '.join(parameters)}): pass").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    return tuple(one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))


def canonical(source: str, entry: str, parameters: tuple[str, ...]) -> str:
    """The same text for programs that differ only in names and layout, whether written as the function `entry`, as its body or as
    the expression that it returns. `parameters`: of a program without a signature. A program that cannot be parsed keeps its
    text, with single spaces."""
    try:
        return _canonical(source, entry, parameters)
    # The sandbox accepts some more layouts and deeper nesting.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return " ".join(source.split())


def _canonical(source: str, entry: str, parameters: tuple[str, ...]) -> str:
    body: list[ast.stmt] = ast.parse(textwrap.dedent(source).strip()).body
    body = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]
    match body:
        case [ast.FunctionDef(name=name) as function] if name == entry:
            parameters = tuple(argument.arg for argument in function.args.args)
            body = function.body[ast.get_docstring(function, clean=False) is not None :]
    match body:
        case [ast.Return(value=ast.expr() as value) | ast.Expr(value=value)]:
            body = [ast.Expr(value)]
    anonymize = _Anonymize(_names(parameters), keep_constants=True)
    return "\n".join(ast.dump(anonymize.visit(node)) for node in body)


def phrases(description: str) -> set[str]:
    """All word n-grams of length WORDS, or all words of a shorter description; lower case, without punctuation."""
    words = re.findall(r"\w+", description.lower())
    return {" ".join(words[at : at + WORDS]) for at in range(max(1, len(words) - WORDS + 1))}
