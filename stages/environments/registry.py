"""Finds domains by name: those shipped here and those other packages bring through entry points."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from stages.environments.protocol import Domain
from stages.validation import ParamsError, explain

GROUP = "bellwether.domains"


def domain_factories() -> dict[str, Callable[[], Any]]:
    """Name -> entry point of every installed domain. Loading happens in `load_domain`, so listing imports nothing."""
    return {point.name: point.load for point in _installed(tuple(sys.path))}


@cache
def _installed(search_path: tuple[str, ...]) -> list[EntryPoint]:
    """Domains of the packages on `search_path`, by name. Every package is looked into, which takes longer than the rest of a
    check of params.yaml: once for each path."""
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def load_domain(name: str, settings: Mapping[str, Any] | None = None) -> Domain:
    """The domain called `name`, with `settings` checked by its own settings class.

    An entry point names a class with a `Settings` attribute (a `DomainSettings`), called with an instance of it.
    Raises ParamsError, naming the nearest known one, for an unknown domain or key, and with the range for a bad value.
    """
    factories = domain_factories()
    if name not in factories:
        near = difflib.get_close_matches(name, factories, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise ParamsError(f"params.yaml: unknown domain '{name}'{hint} Known domains: {', '.join(sorted(factories))}.")
    domain_class: Any = factories[name]()
    try:
        checked = domain_class.Settings(**dict(settings or {}))
    except ValidationError as error:
        raise ParamsError(explain(error, domain_class.Settings, "params.yaml", f"per_domain.{name}.environment.")) from error
    domain: Domain = domain_class(checked)
    return domain


def open_domain(name: str, settings: Mapping[str, Any] | None = None) -> Domain:
    """`load_domain`, ready to play: what stages call that play it, before they load a model or start workers. Raises ParamsError,
    too, where this machine lacks what the domain needs."""
    domain = load_domain(name, settings)
    if hasattr(domain, "ready"):
        domain.ready()
    return domain


def returns_of(domain: Domain) -> tuple[float, float]:
    """The smallest and the largest return of an episode: [0, 1] unless the domain says otherwise."""
    return domain.returns() if hasattr(domain, "returns") else (0.0, 1.0)
