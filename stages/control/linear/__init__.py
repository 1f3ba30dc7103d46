"""Linear systems with quadratic costs, whose values and best controllers are known exactly."""
