"""A language model advises a reinforcement-learning agent, and its advice is adapted to what the agent can do."""
