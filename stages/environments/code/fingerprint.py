"""What is the same about two problems: their solutions but for names and constants, and their descriptions."""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap

WORDS = 13
"""Words in a row that no two descriptions share by chance; shorter descriptions count as a whole."""


class _Nameless(ast.NodeTransformer):
    """Names by the order in which they come, constants by their type, functions without docstring and annotations."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def _name(self, name: str) -> str:
        return self.names.setdefault(name, f"n{len(self.names)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._name(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self._name(node.arg), None)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(type(node.value).__name__)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._name(node.name)
        node.returns = None
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)


_BUILTIN = frozenset(("sum", "len", "max", "min", "sorted", "list", "map", "filter", "set", "dict", "range", "int", "str"))


def fingerprint(source: str, parameters: tuple[str, ...] = ()) -> str:
    """16 hex digits, equal for solutions that differ in names (but those of built-in functions), constants, comments and layout.
    `source`: a module, or the expression or body of a function of `parameters`. Raises SyntaxError for what is neither."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        tree = ast.parse(f"def f({', '.join(parameters)}):\n" + textwrap.indent(source, "    "))
    nameless = _Nameless()
    nameless.names.update({name: name for name in sorted(_BUILTIN)})
    nameless.names.update({name: f"parameter{number}" for number, name in enumerate(parameters)})
    body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    text = "\n".join(ast.dump(nameless.visit(node)) for node in body)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def phrases(description: str) -> set[str]:
    """All runs of WORDS words, or the whole of a shorter description; lower case, without punctuation."""
    words = re.findall(r"\w+", description.lower())
    return {" ".join(words[at : at + WORDS]) for at in range(max(1, len(words) - WORDS + 1))}
