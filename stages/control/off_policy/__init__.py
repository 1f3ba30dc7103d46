"""Off-policy actor-critic learning on Gymnasium's tasks with continuous actions."""
