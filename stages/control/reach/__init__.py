"""Offline learning from a model's rollouts, on a problem where the states that rollouts only end in are known."""
