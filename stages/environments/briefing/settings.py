"""Settings of the briefing domain (per_domain.briefing.environment in params.yaml)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from stages.environments.base_domain import below_raw, some_weight
from stages.environments.protocol import DomainSettings

MAX_POINTS = 6


class BriefingSettings(DomainSettings):
    max_turns: Annotated[int, Field(ge=1, le=1)] = 1
    """A brief is one action."""
    source: Literal["invented", "factbook"] = "invented"
    """invented: names and relations of the search domain, which no model knows and the small base model can write; factbook:
    facts of countries from The World Factbook."""
    points: dict[Annotated[int, Field(ge=1, le=MAX_POINTS)], Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=lambda: {2: 1.0, 3: 1.0}
    )
    """Weights of briefs by the number of facts that they must state."""
    unwanted: Annotated[int, Field(ge=0, le=6)] = 2
    """Facts that the prompt shows and the brief must leave out."""
    slack: Annotated[int, Field(ge=0, le=40)] = 2
    """Words that a brief may have beyond what its facts need."""
    instructions: bool = False
    """Begin with what is expected; for models that were not trained on this domain."""
    folder: str = "data/raw/factbook"
    """factbook: folder of the imported profiles, relative to the repository; must be below data/raw, where DVC tracks it."""

    _some_weight = field_validator("points")(some_weight("points", "{2: 1, 3: 1}"))

    _below_raw = field_validator("folder")(below_raw)
