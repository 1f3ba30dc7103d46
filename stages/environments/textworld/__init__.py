"""Microsoft's TextWorld as a domain: small compiled text games with graded difficulty."""

from stages.environments.textworld.domain import TextWorldDomain
from stages.environments.textworld.settings import TextWorldSettings

__all__ = ["TextWorldDomain", "TextWorldSettings"]
