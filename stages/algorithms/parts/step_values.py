"""What parts that read annotate's step-value model as an estimate of the undiscounted return ask of section `annotate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NO_RETURN = {"hard": "whether success is possible", "process": "the distance from success"}
"""labels.q -> what these labels measure instead of the return to go."""


def not_a_return(annotate: Any, reader: str, instead: str) -> Iterator[str]:
    """Why the model's values are no such estimate; `reader`: the key that reads them, `instead`: the change that makes it not."""
    if annotate.labels.q in NO_RETURN:
        q = annotate.labels.q
        yield (
            f"rl.{reader} needs values that estimate the return, and with annotate.labels.q '{q}' they estimate {NO_RETURN[q]}: "
            f"set q to rollout, tree or best, or {instead}"
        )
    if annotate.gamma != 1.0:
        yield f"rl.{reader} needs undiscounted values, and annotate.gamma is {annotate.gamma:g}: set it to 1, or {instead}"
