"""The `search` domain: multi-hop questions over a fictional encyclopaedia, with BM25 search as the tool.

An episode: "Who is the mentor of the founder of Kelmar?", `search Kelmar founder`, "Kelmar Hall: founder Dorvin; rival Selat;
heir Pomtar.", `search Dorvin mentor`, ..., `answer Selat`. Pages share names with distractors, and questions take 1 to 3 hops.
"""

from stages.environments.search.domain import SearchDomain, SearchSettings
from stages.environments.search.environment import SearchEnvironment

__all__ = ["SearchDomain", "SearchEnvironment", "SearchSettings"]
