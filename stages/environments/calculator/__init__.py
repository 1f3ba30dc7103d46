"""The `calculator` domain: arithmetic with an optional tool that does one operation at a time.

An episode: "what is (47+38)*2-12?", `key 47+38`, "= 85", `key 85*2`, "= 170", `key 170-12`, "= 158", `answer 158`. Easy items,
such as "what is 47*1?", need no tool, though it may be used.
"""

from stages.environments.calculator.domain import CalculatorDomain, CalculatorSettings
from stages.environments.calculator.environment import CalculatorEnvironment

__all__ = ["CalculatorDomain", "CalculatorEnvironment", "CalculatorSettings"]
