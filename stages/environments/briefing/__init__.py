"""The `briefing` domain: write a short brief from given facts; how good it is, no reward says.

An episode: "Kelmar House: ally Corbas; founder Dorvin; patron Mirkos; rival Teldin. brief on Kelmar: rival, founder. list, at
most 7 words.", `Kelmar: rival Teldin; founder Dorvin.` The reward is the share of the demands on form. The quality (which facts
are right, missing, wrong, repeated, in which order, with how much padding) is known to experiments and judges only.
"""

from stages.environments.briefing.domain import BriefingDomain
from stages.environments.briefing.environment import BriefingEnvironment
from stages.environments.briefing.settings import BriefingSettings

__all__ = ["BriefingDomain", "BriefingEnvironment", "BriefingSettings"]
