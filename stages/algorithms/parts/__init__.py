"""The switchable parts of an RL algorithm: settings, defaults, when they apply, and what they can't be combined with."""
