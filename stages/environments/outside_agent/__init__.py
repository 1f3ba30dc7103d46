"""The `outside_agent` domain: any program that talks to a model through OpenAI's API, as an environment.

The program runs in a process of its own, one for each episode. Its requests for chat completions go to an endpoint of this
environment, which hands the newest message to the policy as an observation and returns the policy's action as the reply. So
rollout, rl and evaluate sample every token themselves: the program's turns have exact token ids and log-probabilities, whatever
it does between them.

An episode: the program asks "translate: bonjour", the policy writes "hello", the program looks that up and asks "and au revoir?",
the policy writes "goodbye", the program reports the reward 1 and ends.
"""

from stages.environments.outside_agent.domain import OutsideAgentDomain, OutsideAgentSettings
from stages.environments.outside_agent.environment import OutsideAgentEnvironment

__all__ = ["OutsideAgentDomain", "OutsideAgentEnvironment", "OutsideAgentSettings"]
