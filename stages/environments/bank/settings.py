"""Settings of the bank domain (per_domain.bank.environment in params.yaml)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from stages.environments.base_domain import below_raw
from stages.environments.protocol import DomainSettings


class BankSettings(DomainSettings):
    max_turns: Annotated[int, Field(ge=1, le=64)] = 8
    results: Annotated[int, Field(ge=1, le=10)] = 3
    """Titles that a search lists."""
    page_words: Annotated[int, Field(ge=20, le=2000)] = 60
    """Words of a document that are shown."""
    prompt_words: Annotated[int, Field(ge=20, le=2000)] = 150
    """Words of the customer's situation that are shown."""
    needed: Literal["any", "all"] = "any"
    """What success is: one of the documents that the customer's request takes was opened, or all were."""
    instructions: bool = True
    """Begin with the available actions; models were not trained on this domain."""
    folder: str = "data/raw/bank"
    """Folder of the imported documents, relative to the repository; must be below data/raw, where DVC tracks it."""

    _below_raw = field_validator("folder")(below_raw)
