"""Step credit: how an episode's advantage is distributed over its turns.

`outcome` leaves the advantages unchanged. `graph` and `branches` give steps that several episodes share the mean advantage of
these episodes (graph.py here). `progress` distributes the return before the advantage is estimated (progress.py). `annotated`
adds, on all policy tokens of turn u,

    weight * (r_u + V(s_{u+1}) - V(s_u)),

the turn's temporal-difference error under the step-value model that annotate fitted. V is the expected reward-to-go of the SFT
policy, in the environment's units and undiscounted; with an exact V the term is the turn's advantage. It is potential-based:
over an episode the terms telescope to R - V(s_0), whatever the number of turns, so an idle turn (V unchanged, no reward) gets
exactly 0 and a longer path to the same end earns nothing. V after the last turn is 0 for terminated and truncated episodes
alike: no reward comes after the turn limit, and a bootstrapped V would make idling until the limit cheaper than trying and
failing. The terms are added to advantages, never summed along the episode, so a biased V shifts all turns alike, which has zero
expected gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.batch import Extra, turn_sums, turn_tokens
from stages.algorithms.parts.part import AppliesTo, Part
from stages.algorithms.parts.step_values import not_a_return
from stages.runtime.validation import NonNegative, ParamsError, Share

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Credit(Part):
    """How an episode's advantage is distributed over its turns."""

    kind: Literal["outcome", "annotated", "graph", "branches", "progress", "own"] = "outcome"
    """annotated: adds the temporal-difference error of the annotated value model; graph: equal steps of a group get the mean
    advantage of the episodes that took them; branches: so do turns that branches share; progress: the annotated progress
    estimator distributes the return over turns."""
    weight: Annotated[NonNegative, AppliesTo("kind", "annotated", "progress")] = 1.0
    """annotated: weight of the value model's term; progress: of a turn's contribution."""
    step_reward: Annotated[Literal["spa", "rloo_broadcast"], AppliesTo("kind", "progress")] = "spa"
    """progress: a turn's contribution: the estimator's, or, as in the authors' code, the return minus the mean of the group's
    others, for every turn."""
    residual: Annotated[
        Literal["none", "last_step", "spread"], AppliesTo("kind", "progress"), AppliesTo("step_reward", "spa")
    ] = "none"
    """progress: which turns receive the difference between the return and the sum of contributions."""
    step_weight: Annotated[Literal["one", "steps_to_go"], AppliesTo("kind", "progress")] = "one"
    """progress: steps_to_go multiplies the reward of turn i of N (from 0) by N - 1 - i, as in the authors' code."""
    grounding: Annotated[Literal["penalty", "share", "bonus"], AppliesTo("kind", "progress")] = "penalty"
    """progress: penalty: -grounding_coef for each action that the environment rejected; bonus: grounding_coef for each that it
    accepted; share: that divided by the number of turns."""
    grounding_coef: Annotated[NonNegative, AppliesTo("kind", "progress")] = 0.5
    """Weight of the grounding term."""
    key: Annotated[Literal["transition", "state_action"], AppliesTo("kind", "graph")] = "transition"
    """graph: steps are equal if state, action and next state are, or state and action."""
    history: Annotated[int, Field(ge=0, le=100), AppliesTo("kind", "graph")] = 1
    """graph: number of preceding steps that must be equal, too."""
    match: Annotated[Literal["exact", "cosine", "scrambled"], AppliesTo("kind", "graph")] = "exact"
    """graph: when states are equal: if their keys are; if the cosine similarity of their word counts is at least `threshold`;
    or never (scrambled, a control)."""
    threshold: Annotated[Share, AppliesTo("match", "cosine")] = 0.95
    """cosine: similarity from which two states are equal."""
    repeats: Annotated[Literal["once", "each"], AppliesTo("kind", "graph")] = "once"
    """graph: votes of an episode that takes a step several times: one, or one per time."""
    renormalise: Annotated[Literal["none", "group_std"], AppliesTo("kind", "graph")] = "none"
    """graph: group_std rescales a group's merged advantages to their spread before merging."""

    def check(self, rl: Rl, method: Composition) -> None:
        if self.kind in ("graph", "branches"):
            self._check_merging(rl)
        if self.kind == "progress":
            self._check_progress(rl)
        if self.kind == "annotated" and not rl.reward.environments_own:
            raise ParamsError(
                "rl.credit.kind: annotated adds differences of expected environment rewards, and rl.reward replaces the "
                "environment's rewards: set rl.reward.kind and density to environment and correct and wrong to null, or "
                "credit.kind to outcome"
            )

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        annotate = section("annotate")
        if self.kind == "progress" and self.step_reward != "rloo_broadcast" and annotate.progress.kind == "none":
            yield "rl.credit.kind: progress needs the progress estimator, and annotate.progress.kind is none: set it to spa"
        if self.kind == "annotated":
            yield from not_a_return(annotate, "credit.kind: annotated", "kind to outcome")

    def _check_merging(self, rl: Rl) -> None:
        if self.kind == "branches" and rl.branching.kind == "none":
            raise ParamsError(
                "rl.credit.kind: branches merges turns that branches share; set rl.branching.kind to entropy or random"
            )
        if rl.group_size < 2:
            raise ParamsError(f"rl.credit.kind: {self.kind} compares episodes of a group, and rl.group_size is 1; set it to >= 2")
        if rl.advantage.level == "token":
            raise ParamsError(
                f"rl.credit.kind: {self.kind} gives each turn one advantage, and rl.advantage.level: token gives each token its "
                f"own; set level to trajectory or turn"
            )

    def _check_progress(self, rl: Rl) -> None:
        if rl.advantage.estimator == "group" and rl.advantage.level == "trajectory":
            raise ParamsError(
                "rl.credit.kind: progress distributes the return over turns, and rl.advantage.level: trajectory uses only the "
                "sum; set level to turn"
            )
        reward, ours = rl.reward, self.step_reward == "spa" and self.residual == "none"
        if ours and (reward.kind != "environment" or reward.density != "environment" or reward.correct is not None):
            raise ParamsError(
                "rl.credit.kind: progress with residual: none replaces the return by the estimator's contributions, and "
                "rl.reward would have no effect; set residual to last_step or spread, or rl.reward to the environment's"
            )
        if self.step_reward == "rloo_broadcast" and rl.group_size < 2:
            raise ParamsError(
                "rl.credit.step_reward: rloo_broadcast compares the episodes of a group, and rl.group_size is 1; set it to at "
                "least 2"
            )


@dataclass(frozen=True)
class StepValues(Extra):
    values: Tensor
    """[B, U + 1] float32: the annotated step-value model's V before each turn and after the last (0 if terminated)."""


@dataclass(frozen=True)
class TurnCredit(Extra):
    values: Tensor
    """[B, U] float32: what step credit gave each turn, for readers of the episodes; 0 past the end. With `progress` its reward in
    place of the return, else what credit added to the advantage (the mean over the turn's tokens)."""


def turn_credit(batch: TrajectoryBatch) -> Tensor:
    """r_u + V(s_{u+1}) - V(s_u) for each turn, [B, U] float32, 0 past an episode's last turn, with V after that turn 0.

    Raises ValueError without StepValues.
    """
    import torch

    found = batch.get(StepValues)
    if found is None:
        raise ValueError("rl.credit.kind: annotated needs the step-value model's values; run the annotate stage for this domain")
    turns = torch.arange(batch.turn_rewards.shape[1])[None, :]
    before = found.values[:, :-1]
    after = torch.where(turns + 1 < batch.turns[:, None], found.values[:, 1:], torch.zeros(()))
    return torch.where(batch.real_turns, batch.turn_rewards + after - before, torch.zeros(()))


def add_credit(batch: TrajectoryBatch, params: Credit) -> TrajectoryBatch:
    """The batch with step credit in its `advantages`."""
    from stages.algorithms.parts.graph import edges, merge_steps, step_keys

    if params.kind in ("outcome", "progress", "own"):
        return batch
    if params.kind == "graph":
        return merge_steps(batch, edges(batch, params), params)
    if params.kind == "branches":
        return merge_steps(batch, step_keys(batch, "branches").draws, params)
    if batch.advantages is None:
        raise ValueError("step credit modifies advantages, and the batch has none yet")
    credit = turn_credit(batch).gather(1, batch.turn.clamp(min=0))
    return batch.with_(advantages=batch.advantages + params.weight * credit * batch.mask)


def with_turn_credit(batch: TrajectoryBatch, before: Tensor | None, params: Credit) -> TrajectoryBatch:
    """The batch with TurnCredit, unless the credit is the outcome's. before: its advantages [B, T] without step credit."""
    if params.kind == "outcome" or batch.advantages is None or before is None:
        return batch
    if params.kind == "progress":
        return batch.with_extra(TurnCredit(batch.turn_rewards.float()))
    added = turn_sums((batch.advantages - before) * batch.mask, batch.turn, batch.turn_rewards.shape[1])
    return batch.with_extra(TurnCredit(added / turn_tokens(batch).clamp(min=1.0)))
