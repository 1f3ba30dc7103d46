"""Settings of the factbook domain (per_domain.factbook.environment in params.yaml)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from stages.environments.base_domain import below_raw, some_weight
from stages.environments.protocol import DomainSettings

MAX_HOPS = 3


class FactbookSettings(DomainSettings):
    max_turns: Annotated[int, Field(ge=1, le=64)] = 10
    """A hop takes a search and a page."""
    results: Annotated[int, Field(ge=1, le=10)] = 3
    """Titles that a search lists."""
    page_words: Annotated[int, Field(ge=60, le=2000)] = 80
    """Words of a page that are shown."""
    hops: dict[Annotated[int, Field(ge=1, le=MAX_HOPS)], Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=lambda: {1: 1.0, 2: 2.0, 3: 1.0}
    )
    """Weights of 1-, 2- and 3-hop questions, in recipes and in curation."""
    closed_book: bool = False
    """No tools: the agent has to answer from memory in its first turn."""
    instructions: bool = False
    """Begin with the available actions; for models that were not trained on this domain."""
    folder: str = "data/raw/factbook"
    """Folder of the imported profiles, relative to the repository; must be below data/raw, where DVC tracks it."""

    _some_weight = field_validator("hops")(some_weight("hops", "{1: 1, 2: 2, 3: 1}"))

    _below_raw = field_validator("folder")(below_raw)
