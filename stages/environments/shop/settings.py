"""Settings of the shop domain (per_domain.shop.environment in params.yaml)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from stages.environments.base_domain import some_weight
from stages.environments.protocol import DomainSettings

MAX_OPTIONS = 3


class ShopSettings(DomainSettings):
    max_turns: Annotated[int, Field(ge=1, le=64)] = 8
    """A turn takes about 70 tokens with the shipped base model; 8 turns stay below the default model.max_length."""
    results: Annotated[int, Field(ge=1, le=10)] = 3
    """Items on a page of results; `click next` shows the next ones."""
    options: dict[Annotated[int, Field(ge=0, le=MAX_OPTIONS)], Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=lambda: {1: 1.0, 2: 2.0, 3: 1.0}
    )
    """Weights of tasks by the number of requested options, in recipes and in curation."""
    show_goal: bool = True
    """End every page with the goal, as WebShop does."""
    instructions: bool = False
    """Begin the prompt with the available actions; for models that were not trained on this domain."""

    _some_weight = field_validator("options")(some_weight("options", "{1: 1, 2: 2, 3: 1}"))
