"""Finds domains by name: those shipped here and those other packages bring through entry points."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from stages.environments.protocol import Domain

GROUP = "bellwether.domains"


def domain_factories() -> dict[str, Callable[[], Any]]:
    """Name -> entry point of every installed domain. Loading happens in `load_domain`, so listing imports nothing."""
    return {point.name: point.load for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def load_domain(name: str, settings: Mapping[str, Any] | None = None) -> Domain:
    """The domain called `name`, with `settings` checked by its own settings class.

    An entry point names a class with a `Settings` attribute (a `DomainSettings`), called with an instance of it.
    Raises ValueError, naming the nearest known domain, for an unknown name, and with the key and range for bad settings.
    """
    factories = domain_factories()
    if name not in factories:
        near = difflib.get_close_matches(name, factories, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise ValueError(f"unknown domain '{name}'{hint} Known domains: {', '.join(sorted(factories))}.")
    domain_class: Any = factories[name]()
    try:
        checked = domain_class.Settings(**dict(settings or {}))
    except ValidationError as error:
        raise ValueError(f"per_domain.{name}.environment: {error}") from error
    domain: Domain = domain_class(checked)
    return domain
