"""Merge methods by name, and the check that a setting which a method has no use for is refused rather than ignored."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import BaseModel

from stages.merging.contract import Merger
from stages.merging.dare import Dare, DareTies
from stages.merging.linear import Linear
from stages.merging.ram import Ram, RamPlus
from stages.merging.settings import MergeError, MergeSettings
from stages.merging.slerp import Slerp
from stages.merging.task_arithmetic import TaskArithmetic
from stages.merging.ties import Ties


class RegisteredMerger(Merger, Protocol):
    """A merger that also says which fields of `MergeSettings` it reads."""

    parameters: tuple[str, ...]


MERGERS: dict[str, RegisteredMerger] = {
    merger.card.slug: merger for merger in (Linear(), TaskArithmetic(), Slerp(), Ties(), Dare(), DareTies(), Ram(), RamPlus())
}


def get_merger(method: str) -> RegisteredMerger:
    """The merger called `method`. Raises MergeError with the known names."""
    if method not in MERGERS:
        raise MergeError(f"merge.method '{method}' is unknown; known: {', '.join(MERGERS)}")
    return MERGERS[method]


def check_settings(method: str, settings: MergeSettings) -> None:
    """Raise MergeError if a setting that is not neutral means nothing to `method`."""
    used = get_merger(method).parameters
    if "weights" not in used and any(weight != 1.0 for weight in settings.weights):
        raise MergeError(f"params.yaml: merge.weights has no meaning for merge.method {method}; remove the weights")
    if "normalize" not in used and settings.normalize is not None:
        raise MergeError(f"params.yaml: merge.normalize has no meaning for merge.method {method}; set it to null")
    if "lam" not in used and settings.lam != 1.0:
        raise MergeError(f"params.yaml: merge.lam has no meaning for merge.method {method}; set it to 1.0")


def used_parameters(method: str, settings: MergeSettings) -> dict[str, Any]:
    """The settings that `method` reads, as plain values for a report."""
    values: dict[str, Any] = {}
    for field in get_merger(method).parameters:
        value = getattr(settings, field)
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json")
        values[field] = list(value) if isinstance(value, tuple) else value
    return values
