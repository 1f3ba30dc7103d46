"""Merge methods by name. Settings that a method does not use are rejected, not ignored.

A method is a module of stages/merging/methods with a MERGER; the file name is the method's name. Methods of other packages are
entry points of the group `bellwether.mergers`: such a module, its MERGER or the class. Light to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from stages.merging import methods
from stages.merging.contract import MergeError, MergeParams, Merger
from stages.records.card import Card
from stages.runtime.entry_points import Group, place
from stages.runtime.validation import ParamsError, explain

GROUP = Group("bellwether.mergers", "merge.method", methods, "MERGER")
REQUIRED = sorted(name for name in {*Merger.__annotations__, *vars(Merger)} if not name.startswith("_"))
"""The names of a merger; `Merger` itself has most of them."""
NONE: Mapping[str, Any] = MappingProxyType({})
LOADED: dict[str, Merger] = {}
"""Loaded methods, by name."""


def shipped() -> list[str]:
    """Names of this repository's methods, sorted, without importing them."""
    return sorted(GROUP.shipped())


def get_merger(method: str) -> Merger:
    """The merger called `method`. Raises MergeError for an unknown name (listing the known ones) or an invalid plugin."""
    if method not in LOADED:
        try:
            found = GROUP.load(method)
        except ParamsError as error:
            raise MergeError(str(error)) from error
        LOADED[method] = _merger(method, found)
    return LOADED[method]


def _merger(method: str, made: Any) -> Merger:
    if isinstance(made, type):
        try:
            made = made()
        except Exception as error:
            raise MergeError(GROUP.fault(method, error)) from error
    lacking = [name for name in REQUIRED if not hasattr(made, name)]
    if lacking:
        raise MergeError(
            f"merge.method '{method}': {place(made)} is not a merger, it lacks {', '.join(lacking)}; "
            "inherit from stages.plugins.DeltaMethod, or see Merger there (docs/extending.md)"
        )
    if made.trains and method not in shipped():
        raise MergeError(f"merge.method '{method}': {place(made)} has trains set, but methods of other packages merge weights")
    return made


def check_method(method: str) -> None:
    """Raise MergeError, listing the known names, for an unknown method; imports nothing."""
    if method not in LOADED and method not in GROUP.names():
        raise MergeError(f"is unknown{GROUP.hint(method)}")


def own_settings(method: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """The method's `Settings`, from `merge.settings` (`own`) and, for a shipped method, its keys in section `merge` (`given`).
    Raises MergeError for an unknown key or a value out of range."""
    model = get_merger(method).Settings
    shared = {key: given[key] for key in (model.model_fields if method in shipped() else ()) if key in given}
    if placed := sorted(set(shared) & set(own)):
        raise MergeError(f"gives {', '.join(placed)}, which merge.method {method} reads from section merge itself; move it")
    try:
        return model(**shared, **own)
    except ValidationError as error:
        raise MergeError(explain(error, model, f"merge.method {method}", "merge.settings.")) from error


def bind(method: str, weights: Sequence[float], given: Mapping[str, Any] = NONE, own: Mapping[str, Any] = NONE) -> MergeParams:
    """The parameters of `method` for models of these weights; `given` and `own` as for `own_settings`. Raises MergeError for
    weights that it does not use, a bad value, and what it refuses itself."""
    merger = get_merger(method)
    if not merger.weighted and any(weight != 1.0 for weight in weights):
        raise MergeError(f"merge.weights has no effect with merge.method {method}; remove the weights")
    params = MergeParams(tuple(weights), own_settings(method, given, own))
    merger.check(params)
    return params


def used_parameters(method: str, params: MergeParams) -> dict[str, Any]:
    """The settings that `method` reads, as plain values for a report."""
    weights = {"weights": list(params.weights)} if get_merger(method).weighted else {}
    return {**weights, **params.settings.model_dump(mode="json")}


def cards() -> list[Card]:
    """The cards of the shipped methods, by name."""
    return [get_merger(name).card for name in shipped()]
