"""Checks of `report.patterns` that need neither a domain nor an episode, so that they can be made before anything runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stages.runtime.validation import ParamsError


class OwnPattern(Protocol):
    """An entry of `report.patterns`."""

    domains: list[str]
    predicate: str | None


def place(name: str, key: str) -> str:
    return f"params.yaml: report.patterns.{name}.{key}"


def load_predicate(name: str, given: str) -> Callable[[Mapping[str, Any]], Any]:
    """The function that pattern `name` has as `module:function`. Raises ParamsError if it can't be imported."""
    module, _, function = given.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ParamsError(
            f"{place(name, 'predicate')}: {given} can't be imported ({error}); name a module and its function"
        ) from error


def check_patterns(patterns: Mapping[str, OwnPattern], evaluated: Sequence[str]) -> None:
    """Raise ParamsError for a pattern of a domain that is not evaluated, or whose predicate can't be imported."""
    for name, given in patterns.items():
        if unknown := sorted(set(given.domains) - set(evaluated)):
            listed = ", ".join(evaluated)
            raise ParamsError(
                f"{place(name, 'domains')}: {unknown[0]} is not among domains and evaluate.transfer ({listed}); add it there, or "
                "remove it"
            )
        if given.predicate is not None:
            load_predicate(name, given.predicate)
