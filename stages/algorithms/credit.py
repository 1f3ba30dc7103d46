"""Step credit: how an episode's advantage is spread over its turns.

`outcome` leaves the advantages as they are. `graph` and `branches` give steps that several episodes share the mean advantage of
these episodes (stages/algorithms/graph.py). `progress` spreads the return before the advantage is estimated
(stages/algorithms/progress.py). `annotated` adds, on all policy tokens of turn u,

    weight * (r_u + V(s_{u+1}) - V(s_u)),

the temporal-difference error of the turn under the step-value model that tree search annotated. V is the reward still to come
that the SFT policy can expect, in the environment's units and undiscounted: what a turn pays leaves V and enters r, and with
exact V the term is the turn's advantage. It is potential-based: over an episode the terms telescope to R - V(s_0), whatever
the number of turns, so an idle turn (V unchanged, no reward) is credited with exactly 0 and a longer way to the same end earns
nothing. V after the final turn is 0 for terminated and truncated episodes alike: past the turn limit no reward can come, and a
bootstrapped V would make idling until the limit cheaper than trying and failing. The terms are added to advantages, never
summed along the episode, so a miscalibrated V shifts all turns alike, and such a shift has zero expected gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.contract import TrajectoryBatch
from stages.algorithms.graph import edges, merge_steps
from stages.parameters.rl import Credit


def turn_credit(batch: TrajectoryBatch) -> Tensor:
    """r_u + V(s_{u+1}) - V(s_u) for each turn, [B, U] float32, 0 past an episode's last turn, with V after that turn 0.

    Raises ValueError if the batch carries no `turn_values`.
    """
    if batch.turn_values is None:
        raise ValueError("rl.credit.kind: annotated needs the step-value model's values; run the annotate stage for this domain")
    turns = torch.arange(batch.turn_rewards.shape[1])[None, :]
    before = batch.turn_values[:, :-1]
    after = torch.where(turns + 1 < batch.turns[:, None], batch.turn_values[:, 1:], torch.zeros(()))
    return torch.where(turns < batch.turns[:, None], batch.turn_rewards + after - before, torch.zeros(()))


def add_credit(batch: TrajectoryBatch, params: Credit) -> TrajectoryBatch:
    """The batch with the step credit of `params` in `advantages` on policy tokens."""
    if params.kind in ("outcome", "progress", "own", None):
        return batch
    if params.kind == "graph":
        return merge_steps(batch, edges(batch, params), params)
    if params.kind == "branches":
        if batch.draws is None:
            raise ValueError("rl.credit.kind: branches needs to know which turns were taken over, and this batch does not")
        return merge_steps(batch, batch.draws, params)
    if batch.advantages is None:
        raise ValueError("step credit is added to advantages, and the batch has none yet")
    weight = 1.0 if params.weight is None else params.weight
    spread = turn_credit(batch).gather(1, batch.turn.clamp(min=0))
    return batch.with_(advantages=batch.advantages + weight * spread * batch.mask)
