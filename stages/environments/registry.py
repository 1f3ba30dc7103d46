"""Finds domains by name through entry points: those shipped here and those of other packages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from stages.environments.constrained import ConstrainedDomain
from stages.environments.protocol import Domain, DomainSettings, Environment, Observation, Step
from stages.runtime.entry_points import Group, place
from stages.runtime.validation import ParamsError, explain

GROUP = Group("bellwether.domains", "domain")
DOMAIN_METHODS = ("recipes", "build", "check", "make", "expert", "entities")
ENVIRONMENT_METHODS = ("reset", "step", "snapshot", "restore", "state_key", "admissible", "close")


def load_domain(name: str, settings: Mapping[str, Any] | None = None) -> Domain:
    """The domain called `name` with the given settings.

    Its entry point names a class with `Settings` (a `DomainSettings`), which is called with an instance of them. Raises
    ParamsError for an unknown domain or key (with the nearest known name), for an invalid value (with its range), and for a class
    that is not a domain (with file and line).
    """
    domain_class = _class_of(name)
    try:
        checked = domain_class.Settings(**dict(settings or {}))
    except ValidationError as error:
        raise ParamsError(explain(error, domain_class.Settings, "params.yaml", f"per_domain.{name}.environment.")) from error
    try:
        domain: Domain = domain_class(checked)
    except Exception as error:
        raise ParamsError(GROUP.fault(name, error, "its class can't be called with an instance of its Settings")) from error
    if not domain_class.__module__.startswith("stages."):
        domain.make = functools.partial(_checked_make, domain.make)  # type: ignore[method-assign]
    return domain if checked.constraint is None else ConstrainedDomain(domain, checked.constraint)


def settings_of(name: str) -> type[DomainSettings]:
    """The keys of `per_domain.<name>.environment`. Raises ParamsError for a domain that is unknown or not one."""
    found: type[DomainSettings] = _class_of(name).Settings
    return found


def _class_of(name: str) -> Any:
    if name not in GROUP.points():
        raise ParamsError(f"params.yaml: {GROUP.unknown(name)}")
    domain_class: Any = GROUP.load(name)
    if faults := class_faults(name, domain_class):
        raise ParamsError("\n".join(f"{place(domain_class)}: domain '{name}': {fault}" for fault in faults))
    return domain_class


def class_faults(name: str, domain_class: Any) -> list[str]:
    """Why a class is not a domain of this name, and how to fix it."""
    if not inspect.isclass(domain_class):
        return [f"the entry point names {domain_class!r}; name a class"]
    found = []
    if (own := getattr(domain_class, "name", None)) != name:
        found.append(f'its `name` is {own!r}, not the entry point\'s; set name = "{name}"')
    settings = getattr(domain_class, "Settings", None)
    if not (inspect.isclass(settings) and issubclass(settings, DomainSettings)):
        found.append("it has no `Settings` that is a subclass of stages.plugins.DomainSettings; add one, which may be empty")
    if missing := _missing(domain_class, DOMAIN_METHODS):
        found.append(f"it lacks {', '.join(missing)}; see stages/environments/protocol.py")
    return found


def _missing(owner: Any, names: Sequence[str]) -> list[str]:
    """Those of `names` that are not methods of a class or instance, or are abstract."""
    methods = {name: getattr(owner, name, None) for name in names}
    return [name for name, found in methods.items() if not callable(found) or getattr(found, "__isabstractmethod__", False)]


def _checked_make(make: Callable[..., Any], folder: Any) -> Environment:
    """An environment of another package, whose missing methods and wrong results raise ParamsError with file and line."""
    environment = make(folder)
    if missing := _missing(environment, ENVIRONMENT_METHODS):
        raise ParamsError(
            f"{place(environment)}: the environment lacks {', '.join(missing)}; see stages/environments/protocol.py"
        )
    for method, kind in (("reset", Observation), ("step", Step)):
        setattr(environment, method, _checked_result(getattr(environment, method), kind))
    return environment


def _checked_result(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
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
    """`load_domain` for stages that play it, before they load a model or start workers. Also raises ParamsError if this machine
    lacks what the domain needs."""
    domain = load_domain(name, settings)
    if hasattr(domain, "ready"):
        domain.ready()
    return domain


def returns_of(domain: Domain) -> tuple[float, float]:
    """The smallest and the largest return of an episode; default: 0 and 1."""
    return domain.returns() if hasattr(domain, "returns") else (0.0, 1.0)
