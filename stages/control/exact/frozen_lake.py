"""Gymnasium's FrozenLake-v1 as a linear MDP, with any probability to slip: the second test of robust value iteration."""

from __future__ import annotations

import numpy as np

from stages.control.exact.linear_mdp import Array, LinearMdp

FIELDS = ("SFFF", "FHFH", "FFFH", "HFFG")
"""Gymnasium's map of 4 by 4: S start, F ice, H hole, G goal."""
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Rows and columns of the actions left, down, right and up; its neighbours in this circle are the sides of an action."""


def frozen_lake(horizon: int, slip: float) -> LinearMdp:
    """Features are unit vectors of state and action, [S, A, S * A]. The state after the last field is the end, which is worth
    nothing: there is the way from holes, and from the goal, whose every action gives 1. So rewards depend on state and action
    alone, as linear MDPs have it, and arrive a step later than in Gymnasium: an episode has `horizon` steps and that one."""
    kernel, goal, start = _kernel(slip)
    states, actions = kernel.shape[:2]
    features = np.eye(states * actions).reshape(states, actions, -1)
    theta = np.zeros((states, actions))
    theta[goal] = 1.0
    steps = horizon + 1
    return LinearMdp(
        features,
        np.tile(theta.ravel(), (steps, 1)),
        np.tile(kernel.reshape(-1, states), (steps, 1, 1)),
        start=start,
        fail=states - 1,
        most=1.0,
    )


def _kernel(slip: float) -> tuple[Array, int, int]:
    """Probabilities [S, A, S] of the next state, and the fields of goal and start."""
    rows, columns, flat = len(FIELDS), len(FIELDS[0]), "".join(FIELDS)
    end = len(flat)
    kernel = np.zeros((end + 1, len(MOVES), end + 1))
    kernel[end, :, end] = 1.0
    for place, action in np.ndindex(end, len(MOVES)):
        row, column = divmod(place, columns)
        if flat[place] in "HG":
            kernel[place, action, end] = 1.0
            continue
        for turn, chance in ((0, 1.0 - slip), (-1, slip / 2), (1, slip / 2)):
            down, right = MOVES[(action + turn) % len(MOVES)]
            to = (min(max(row + down, 0), rows - 1), min(max(column + right, 0), columns - 1))
            kernel[place, action, to[0] * columns + to[1]] += chance
    return kernel, flat.index("G"), flat.index("S")
