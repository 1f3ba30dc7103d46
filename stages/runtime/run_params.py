"""What stages and the parts below stages/params.py read of a checked params.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self

from stages.runtime.resources import Resources


class RunParams(Protocol):
    """stages.params.Params; sections other than `resources` are of their parts' types, which are above runtime."""

    seed: int
    domains: list[str]
    resources: Resources
    model: Any
    sft: Any
    merge: Any
    evaluate: Any
    per_domain: Any

    def section(self, name: str, domain: str) -> Any:
        """A section with the overrides of `domain`."""
        ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy with the sections of `update` instead."""
        ...
