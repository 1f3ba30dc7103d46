"""Settings of conversions of a planted log (environment `calls` of the board's lane control). Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stages.runtime.validation import Count, Positive, Section, Share


class PlantedCalls(Section):
    """A log whose kinds of calls and right answers are known, converted to small models."""

    seed: Annotated[int, Field(ge=0)] = 0
    calls: Annotated[int, Field(ge=200)] = 2000
    """Logged before the first round, a quarter of each kind."""
    shifted: Annotated[int, Field(ge=100)] = 500
    """Calls of one kind in a new wording, logged after the first round."""
    rounds: Literal[1, 2] = 2
    """Rounds of the conversion; the second one sees the new wording."""
    k: Count | None = None
    """Clusters; null: by the silhouette; 1: one small model for all calls."""
    layers: Count = 1
    """Of the base model that the small model keeps."""
    epochs: Count = 8
    """Of a specialist's training."""
    learning_rate: Positive = 0.002
    """Of a specialist."""
    epsilon: Share = 0.02
    """How much worse than the large model a specialist may be."""
