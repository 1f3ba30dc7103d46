"""Step credit: how an episode's advantage is spread over its turns.

`outcome` leaves the advantages as they are. `graph` and `branches` give steps that several episodes share the mean advantage of
these episodes (stages/algorithms/parts/graph.py). `progress` spreads the return before the advantage is estimated
(stages/algorithms/parts/progress.py). `annotated` adds, on all policy tokens of turn u,

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

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.algorithms.parts.part import AppliesTo, Part
from stages.runtime.validation import NonNegative, ParamsError, Share

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Credit(Part):
    """Step credit: how an episode's advantage is spread over its turns."""

    kind: Literal["outcome", "annotated", "graph", "branches", "progress", "own"] = "outcome"
    """graph: equal steps of a group get the mean advantage of the episodes that took them; branches: so do the turns that
    branches have in common; progress: the return is spread over turns by the annotated progress estimator."""
    weight: Annotated[NonNegative, AppliesTo("kind", "annotated", "progress", "own")] = 1.0
    """annotated: weight of V(after) - V(before) of the annotated value model, added to the outcome's advantage; progress: of a
    turn's contribution."""
    step_reward: Annotated[Literal["spa", "rloo_broadcast"], AppliesTo("kind", "progress")] = "spa"
    """progress: a turn's contribution: the estimator's, or, as the authors' code has it, the return minus the mean of the group's
    others, for every turn."""
    residual: Annotated[
        Literal["none", "last_step", "spread"], AppliesTo("kind", "progress"), AppliesTo("step_reward", "spa")
    ] = "none"
    """progress: where what the contributions lack of the return goes."""
    step_weight: Annotated[Literal["one", "steps_to_go"], AppliesTo("kind", "progress")] = "one"
    """progress: steps_to_go multiplies the reward of turn i of N (from 0) by N - 1 - i, as the authors' code does."""
    grounding: Annotated[Literal["penalty", "share", "bonus"], AppliesTo("kind", "progress")] = "penalty"
    """progress: for actions that the environment did not understand -grounding_coef; or for those it did grounding_coef over the
    number of turns; or grounding_coef."""
    grounding_coef: Annotated[NonNegative, AppliesTo("kind", "progress")] = 0.5
    """Weight of the grounding term."""
    key: Annotated[Literal["transition", "state_action"], AppliesTo("kind", "graph")] = "transition"
    """graph: steps are equal if state, action and next state are, or state and action."""
    history: Annotated[int, Field(ge=0, le=100), AppliesTo("kind", "graph")] = 1
    """graph: so many steps before must be equal too."""
    match: Annotated[Literal["exact", "cosine", "scrambled"], AppliesTo("kind", "graph")] = "exact"
    """graph: when state keys are equal: exactly, or if their word counts have a cosine of `threshold`; scrambled, the control:
    never."""
    threshold: Annotated[Share, AppliesTo("match", "cosine")] = 0.95
    """cosine: similarity from which two states are equal."""
    repeats: Annotated[Literal["once", "each"], AppliesTo("kind", "graph")] = "once"
    """graph: votes of an episode that takes a step several times: one, or one each time."""
    renormalise: Annotated[Literal["none", "group_std"], AppliesTo("kind", "graph")] = "none"
    """graph: group_std scales a group's merged advantages back to the spread that they had."""

    def check(self, rl: Rl, method: Composition) -> None:
        if self.kind in ("graph", "branches"):
            self._check_merging(rl)
        if self.kind == "progress":
            self._check_progress(rl)

    def _check_merging(self, rl: Rl) -> None:
        """Merging needs a group, turns that have one advantage each, and, for branches, branching."""
        if self.kind == "branches" and rl.branching.kind == "none":
            raise ParamsError(
                "rl.credit.kind: branches is about turns that branches share; set rl.branching.kind to entropy or random"
            )
        if rl.group_size < 2:
            raise ParamsError(f"rl.credit.kind: {self.kind} compares episodes of a group, and rl.group_size is 1; set it to >= 2")
        if rl.advantage.level == "token":
            raise ParamsError(
                f"rl.credit.kind: {self.kind} gives whole turns one advantage, and rl.advantage.level: token gives each token "
                f"its own; set level to trajectory or turn"
            )

    def _check_progress(self, rl: Rl) -> None:
        """Rewards of steps must have an effect, and leave other switches theirs."""
        if rl.advantage.estimator == "group" and rl.advantage.level == "trajectory":
            raise ParamsError(
                "rl.credit.kind: progress spreads the return over turns, and rl.advantage.level: trajectory looks at the sum "
                "alone; set level to turn"
            )
        reward, ours = rl.reward, self.step_reward == "spa" and self.residual == "none"
        if ours and (reward.kind != "environment" or reward.density != "environment" or reward.correct is not None):
            raise ParamsError(
                "rl.credit.kind: progress with residual: none puts the estimator's contributions in the place of the return, and "
                "rl.reward would have no effect; set residual to last_step or spread, or rl.reward to the environment's"
            )
        if self.step_reward == "rloo_broadcast" and rl.group_size < 2:
            raise ParamsError(
                "rl.credit.step_reward: rloo_broadcast compares the episodes of a group, and rl.group_size is 1; set it to at "
                "least 2"
            )


def turn_credit(batch: TrajectoryBatch) -> Tensor:
    """r_u + V(s_{u+1}) - V(s_u) for each turn, [B, U] float32, 0 past an episode's last turn, with V after that turn 0.

    Raises ValueError if the batch carries no `turn_values`.
    """
    import torch

    if batch.turn_values is None:
        raise ValueError("rl.credit.kind: annotated needs the step-value model's values; run the annotate stage for this domain")
    turns = torch.arange(batch.turn_rewards.shape[1])[None, :]
    before = batch.turn_values[:, :-1]
    after = torch.where(turns + 1 < batch.turns[:, None], batch.turn_values[:, 1:], torch.zeros(()))
    return torch.where(turns < batch.turns[:, None], batch.turn_rewards + after - before, torch.zeros(()))


def add_credit(batch: TrajectoryBatch, params: Credit) -> TrajectoryBatch:
    """The batch with the step credit of `params` in `advantages` on policy tokens."""
    from stages.algorithms.parts.graph import edges, merge_steps

    if params.kind in ("outcome", "progress", "own"):
        return batch
    if params.kind == "graph":
        return merge_steps(batch, edges(batch, params), params)
    if params.kind == "branches":
        if batch.draws is None:
            raise ValueError("rl.credit.kind: branches needs to know which turns were taken over, and this batch does not")
        return merge_steps(batch, batch.draws, params)
    if batch.advantages is None:
        raise ValueError("step credit is added to advantages, and the batch has none yet")
    spread = turn_credit(batch).gather(1, batch.turn.clamp(min=0))
    return batch.with_(advantages=batch.advantages + params.weight * spread * batch.mask)
