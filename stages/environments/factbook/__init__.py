"""The `factbook` domain: questions of one to three hops over The World Factbook, with full-text search as the tool.

An episode: "What is the median age of the country with which Chad shares its longest land border, in years?", `search Chad Land
boundaries`, "1 Chad: Land boundaries ...", `open 1`, ..., `answer 19.4`. Regions of train, valid and test are disjoint.
"""

from stages.environments.factbook.domain import FactbookDomain
from stages.environments.factbook.environment import FactbookEnvironment
from stages.environments.factbook.settings import FactbookSettings

__all__ = ["FactbookDomain", "FactbookEnvironment", "FactbookSettings"]
