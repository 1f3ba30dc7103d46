"""The `keydoor` domain: rooms behind locked doors, keys in side rooms, and a thing to find; small enough to be solved exactly.

An episode: "Find thing41. thing41 room56, key34 room78." "you are in room12. exits room78, room90. room56 needs key34.",
`go room78`, `take key34`, `go room12`, `unlock room56`, `go room56`, `take thing41`. `exact` gives the exact value of every
state, action and step under any policy.
"""

from stages.environments.keydoor.domain import KeydoorDomain
from stages.environments.keydoor.environment import KeydoorEnvironment
from stages.environments.keydoor.settings import KeydoorSettings, Level

__all__ = ["KeydoorDomain", "KeydoorEnvironment", "KeydoorSettings", "Level"]
