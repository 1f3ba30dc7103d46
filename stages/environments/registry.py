"""Finds domains by name: those shipped here and those other packages bring through entry points."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from stages.environments.protocol import Domain, DomainSettings, Environment, Observation, Step
from stages.runtime.installed import Group, place
from stages.runtime.validation import ParamsError, explain

GROUP = Group("bellwether.domains", "domain")
METHODS = ("recipes", "build", "check", "make", "expert", "entities")
PLAYED = ("reset", "step", "snapshot", "restore", "state_key", "admissible", "close")


def domain_factories() -> dict[str, Callable[[], Any]]:
    """Name -> entry point of every installed domain. Loading happens in `load_domain`, so listing imports nothing."""
    return {name: point.load for name, point in GROUP.points().items()}


def load_domain(name: str, settings: Mapping[str, Any] | None = None) -> Domain:
    """The domain called `name`, with `settings` checked by its own settings class.

    An entry point names a class with a `Settings` attribute (a `DomainSettings`), called with an instance of it.
    Raises ParamsError, naming the nearest known one, for an unknown domain or key, with the range for a bad value, and with file
    and line for a class that is no domain.
    """
    if name not in GROUP.points():
        raise ParamsError(f"params.yaml: {GROUP.unknown(name, ())}")
    domain_class: Any = GROUP.load(name)
    if faults := class_faults(name, domain_class):
        raise ParamsError("\n".join(f"{place(domain_class)}: domain '{name}': {fault}" for fault in faults))
    try:
        checked = domain_class.Settings(**dict(settings or {}))
    except ValidationError as error:
        raise ParamsError(explain(error, domain_class.Settings, "params.yaml", f"per_domain.{name}.environment.")) from error
    try:
        domain: Domain = domain_class(checked)
    except Exception as error:
        raise ParamsError(GROUP.fault(name, error, "its class can't be called with its settings")) from error
    if not domain_class.__module__.startswith("stages."):
        domain.make = functools.partial(_made, domain.make)  # type: ignore[method-assign]
    return domain


def class_faults(name: str, domain_class: Any) -> list[str]:
    """What keeps a class from being a domain of this name, with what to do about it."""
    if not inspect.isclass(domain_class):
        return [f"the entry point names {domain_class!r}; let it name a class"]
    found = []
    if getattr(domain_class, "name", None) != name:
        found.append(f'its `name` is {getattr(domain_class, "name", None)!r}, not the entry point\'s; set name = "{name}"')
    settings = getattr(domain_class, "Settings", None)
    if not (inspect.isclass(settings) and issubclass(settings, DomainSettings)):
        found.append("it has no `Settings` that is a subclass of stages.plugins.DomainSettings; add one, empty if need be")
    if lacking := [method for method in METHODS if not _has(domain_class, method)]:
        found.append(f"it lacks {', '.join(lacking)}; see stages/environments/protocol.py")
    return found


def _has(owner: Any, name: str) -> bool:
    method = getattr(owner, name, None)
    return callable(method) and not getattr(method, "__isabstractmethod__", False)


def _made(make: Callable[..., Any], folder: Any) -> Environment:
    """An environment of another package: what it lacks, or returns wrongly, is said with file and line."""
    environment = make(folder)
    if lacking := [method for method in PLAYED if not _has(environment, method)]:
        raise ParamsError(f"{place(environment)}: the environment lacks {', '.join(lacking)}; add it (environments/protocol.py)")
    for method, kind in (("reset", Observation), ("step", Step)):
        setattr(environment, method, _returning(getattr(environment, method), kind))
    return environment


def _returning(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        result = function(*arguments)
        if not isinstance(result, kind):
            raise ParamsError(
                f"{place(function)}: {function.__name__} returned {type(result).__name__}, not {kind.__name__}; "
                f"return stages.plugins.{kind.__name__}(...)"
            )
        return result

    return checked


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
