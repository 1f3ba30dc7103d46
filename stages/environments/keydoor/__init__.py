"""The `keydoor` domain: rooms behind locked doors, keys in side rooms, and a thing to find; small enough to solve exactly.

An episode: "Find lamp. lamp Kelmar, iron key Dorvin." "you are in Balran. exits Dorvin, Selmak. Kelmar needs iron key.",
`go Dorvin`, `take iron key`, `go Balran`, `unlock Kelmar`, `go Kelmar`, `take lamp`. `exact` computes the exact value of
every state, action and step under any policy.
"""

from stages.environments.keydoor.domain import KeydoorDomain
from stages.environments.keydoor.environment import KeydoorEnvironment
from stages.environments.keydoor.settings import KeydoorSettings, Level

__all__ = ["KeydoorDomain", "KeydoorEnvironment", "KeydoorSettings", "Level"]
