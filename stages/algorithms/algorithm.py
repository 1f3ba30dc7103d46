"""Composes a method: `rl.algorithm` names a composition, and every key that the user sets overrides its part.

algorithm = resolve(params.section("rl", domain), params.model.max_length)
plan = algorithm.plan(vocabulary)                           # how the episodes of a group are played
batch = algorithm.shape(batch)                              # reward shaping, over the whole batch
while algorithm.missing_groups(batch): ...                  # play further tasks, if groups are resampled so
batch = algorithm.resample(batch, *key)                     # weights of groups
batch = algorithm.prepare(batch)                            # advantages and step credit
total = denominators(minibatch, ...)                        # before micro-batching
terms = algorithm.loss(logprobs, entropy, micro, total)     # a share of the loss
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stages.agent.branching import Plan
from stages.agent.logprobs import Vocabulary
from stages.algorithms.batch import LossTerms, TrajectoryBatch, turn_means
from stages.algorithms.card import Card, Composition
from stages.algorithms.parts import advantage, group_resampling, horizon, whole_groups
from stages.algorithms.parts.branching import EntropyPlan
from stages.algorithms.parts.cost import joined, with_cost
from stages.algorithms.parts.credit import add_credit, with_turn_credit
from stages.algorithms.parts.critic import needs_critic
from stages.algorithms.parts.external import external_loss
from stages.algorithms.parts.gae import gae_advantage
from stages.algorithms.parts.loss import (
    LOSSES,
    Denominators,
    Loss,
    WithoutKl,
    aggregate,
    clipped,
    kl_estimate,
    log_ratio,
    unit_log_ratio,
)
from stages.algorithms.parts.progress import progress_rewards
from stages.algorithms.parts.reward import kl_penalty, shape_rewards
from stages.algorithms.parts.team_gae import team_advantage
from stages.algorithms.parts.turn_critic import turn_critic_advantage
from stages.algorithms.resolve import resolve_section, role_section
from stages.algorithms.settings import Rl

ESTIMATORS = {"gae": gae_advantage, "utterance": turn_critic_advantage, "group": advantage.group_advantage}


@dataclass(frozen=True)
class Algorithm:
    """A method with every switch resolved. `rl`: the resolved section; its `settings` is the method's own model."""

    method: Composition
    rl: Rl
    state: dict[str, Any] = field(default_factory=dict)
    """What the method's pieces remember between steps (see `Composition.state`); part of checkpoints."""
    costs: dict[str, list[float]] = field(default_factory=dict)
    """The windows of part `cost`, by role: transformed costs of the newest episodes; part of checkpoints."""
    role: str = ""

    @property
    def card(self) -> Card:
        return self.method.card

    def of_role(self, role: str) -> Algorithm:
        """The algorithm of a role's episodes (see `resolve.role_section`); what it remembers is in this one's state."""
        state = self.state.setdefault(f"role {role}", self.method.state()) if self.method.state is not None else {}
        return Algorithm(self.method, role_section(self.method, self.rl, role), state, self.costs, role)

    @property
    def needs_critic(self) -> bool:
        """Whether batches need a critic's `values` of tokens."""
        return self.method.data != "pairs" and needs_critic(self.rl)

    @property
    def needs_turn_critic(self) -> bool:
        """Whether batches need TurnCritic, from a critic that learns off-policy from replayed episodes."""
        return self.method.data != "pairs" and self.rl.advantage.estimator == "utterance"

    @property
    def needs_reference(self) -> bool:
        """Whether batches need `logprobs_ref` for training (reports use a sample of them in any case)."""
        own = self.method.reference is not None and self.method.reference(self.rl)
        return own or self.rl.loss.kl_coef > 0 or self.rl.reward.kl_coef > 0

    @property
    def needs_vocabulary(self) -> bool:
        """Whether its loss reads the policy's whole distribution before each token."""
        return self._own_loss(self.method.vocabulary)

    @property
    def needs_rescoring(self) -> bool:
        """Whether the training pass recomputes the log-probabilities before the step."""
        return self._own_loss(self.method.rescored)

    @property
    def compares_with_old(self) -> bool:
        """Whether its loss compares log-probabilities with those before the step's first update (a method's own loss may)."""
        return self.rl.loss.kind != "policy_gradient" or self.external_per_group > 0

    def _own_loss(self, condition: Callable[[Rl], bool] | None) -> bool:
        return condition is not None and self.rl.loss.kind == "own" and condition(self.rl)

    @property
    def needs_progress(self) -> bool:
        """Whether batches need the progress estimator's Progress."""
        return self.rl.credit.kind == "progress" and self.rl.credit.step_reward == "spa"

    @property
    def needs_teacher(self) -> bool:
        """Whether batches need Teacher."""
        return self.rl.credit.kind == "own" and self.method.teacher is not None and self.method.teacher(self.rl)

    @property
    def whole_groups(self) -> bool:
        """Whether a micro-batch must contain all or none of a group's rows."""
        return self.method.whole_groups and self.rl.loss.kind == "own"

    @property
    def external_per_group(self) -> int:
        """How many episodes of each group are demonstrations."""
        return self.rl.external.per_group

    @property
    def needs_greedy(self) -> bool:
        """Whether each task needs a greedy episode beside its group."""
        return self.rl.advantage.mean == "greedy" or (self.rl.reward.kind == "judge" and self.rl.judge.anchored_by_greedy)

    def turn_limit(self, step: int, longest: int) -> int | None:
        """Turn limit of episodes of step `step` (from 0); None for the environment's own limit, `longest`."""
        return None if self.rl.horizon.kind == "environment" else horizon.turn_limit(self.rl.horizon, step, longest)

    def plan(self, vocabulary: int) -> Plan | None:
        """How a group's episodes branch, if they do; `vocabulary`: size of the policy's."""
        branching = self.rl.branching
        if branching.kind == "own":
            return self.method.pieces["branching"](self.rl)
        return None if branching.kind == "none" else EntropyPlan(branching, vocabulary)

    def shape(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The batch with shaped rewards. Called anew when further episodes join the batch."""
        if self.rl.reward.kind == "own":
            batch = self.method.pieces["reward"](batch, self.rl)
        return with_cost(shape_rewards(batch, self.rl.reward), self.rl.cost, self.costs.get(self.role, ()))

    def missing_groups(self, batch: TrajectoryBatch) -> int:
        """How many further tasks to play so that a shaped batch has enough groups (at most `group_resampling.rounds` times)."""
        return group_resampling.missing_groups(batch, self.rl.group_resampling, self.rl.tasks_per_step)

    def resample(self, batch: TrajectoryBatch, *key: object) -> TrajectoryBatch:
        """The shaped batch with the rows' `weight` and `smoothing`, where groups are resampled; `key`: of the random draws."""
        if self.rl.group_resampling.kind == "own":
            return self._own_piece("group_resampling", batch)
        return group_resampling.resample(batch, self.rl.group_resampling, self.rl.tasks_per_step, self.rl.reward.prs, *key)

    def prepare(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The batch with `advantages` (and `returns` where there is a critic), step credit included; costs join their window."""
        if self.rl.cost.kind != "none":
            self.costs[self.role] = joined(self.costs.get(self.role, ()), batch, self.rl.cost)
        batch = kl_penalty(batch, self.rl.reward)
        if self.rl.credit.kind == "progress":
            batch = progress_rewards(batch, self.rl.credit)
        if self.rl.advantage.estimator == "own":
            batch = self._own_piece("advantage", batch)
        elif self.rl.advantage.estimator == "team":
            batch = team_advantage(batch, self.rl.advantage, self.rl.team)
        else:
            batch = ESTIMATORS[self.rl.advantage.estimator](batch, self.rl.advantage)
        batch = advantage.finish(batch, self.rl.advantage)
        before = batch.advantages
        if self.rl.credit.kind == "own":
            batch = self._own_piece("credit", batch)
        batch = with_turn_credit(add_credit(batch, self.rl.credit), before, self.rl.credit)
        batch = group_resampling.mask_overlong(batch, self.rl.group_resampling)
        return whole_groups.with_group_sizes(batch) if self.whole_groups else batch

    def _own_piece(self, name: str, batch: TrajectoryBatch) -> TrajectoryBatch:
        state = (self.state,) if self.method.state is not None else ()
        return self.method.pieces[name](batch, self.rl, *state)

    def forward_rows(self, batch: TrajectoryBatch) -> Tensor:
        """Indices [b] int64 of a prepared batch's rows that have to go through the policy."""
        loss = self.rl.loss
        imitates = self.external_per_group > 0 and self.rl.external.loss == "sft"
        added = loss.kl_coef or loss.entropy_coef or self.rl.observation.coef
        proportional = not added and loss.kind != "own" and not imitates
        without = group_resampling.zero_advantage_rows(batch) if proportional and self.rl.dead_groups == "drop" else None
        return group_resampling.forward_rows(batch, without)

    def loss(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        batch: TrajectoryBatch,
        total: Denominators,
        vocabulary: Vocabulary | None = None,
    ) -> LossTerms:
        """One micro-batch's share of the loss.

        logprobs, entropy: [b, T] under the current policy, 0 off the mask; `batch` has the same rows; `total` is the optimiser
        step's; `vocabulary`: where the method needs it. `sums` adds up over micro-batches, except `max_ratio`, a maximum. Raises
        ValueError if the method needs whole groups and the micro-batch splits one.
        """
        params = self.rl.loss
        if self.whole_groups:
            whole_groups.check_whole_groups(batch)
        if params.kind == "own":
            distribution = (vocabulary,) if self.needs_vocabulary else ()
            per_token = self.method.pieces["loss"](logprobs, batch, self.rl, *distribution)
        else:
            per_token = LOSSES[params.kind](logprobs, batch, params)
        if batch.external is not None:
            per_token = torch.where(batch.external, external_loss(logprobs, batch, self.rl.external), per_token)
        if params.kl_coef:
            if batch.logprobs_ref is None:
                raise ValueError("rl.loss.kl_coef is above 0 and the batch has no reference log-probabilities")
            kl = kl_estimate(logprobs, batch.logprobs_ref, params.kl_estimator)
            if (without := batch.get(WithoutKl)) is not None:
                kl = kl * ~without.free[:, None]
            # The estimators only hold for the policy's own samples.
            per_token = per_token + params.kl_coef * kl * batch.policy_mask
        bonus, separate = params.entropy_coef * entropy, params.entropy_aggregation == "token_mean"
        if params.entropy_coef and not separate:
            per_token = per_token - bonus
        means = turn_means(batch) if params.aggregation == "turn_mean" else None
        loss = aggregate(per_token, batch.mask, params.aggregation, total, batch.weight, means)
        if params.entropy_coef and separate:
            loss = loss - aggregate(bonus, batch.mask, "token_mean", total, batch.weight)
        return LossTerms(loss, _statistics(logprobs.detach(), entropy.detach(), batch, params, loss.detach()))


def _statistics(logprobs: Tensor, entropy: Tensor, batch: TrajectoryBatch, params: Loss, loss: Tensor) -> dict[str, Tensor]:
    mask = batch.policy_mask
    ratio = log_ratio(logprobs, batch).exp()
    sums = {
        "loss": loss,
        "tokens": mask.sum(),
        "entropy": (entropy * mask).sum(),
        "ratio": (ratio * mask).sum(),
        "max_ratio": (ratio * mask).max(),
        "clipped": (clipped(logprobs, batch, params) & mask).sum(),
    }
    if params.kl_stop is not None:
        logs = unit_log_ratio(logprobs, batch, params)
        counts = turn_means(batch) * mask if params.kind == "turn_clip" else mask.float()
        sums |= {"drift": ((logs.exp() - 1 - logs) * counts).sum(), "drift_units": counts.sum()}
    if batch.external is not None:
        sums["external_tokens"] = batch.external.sum()
        sums["external_probability"] = (logprobs.exp() * batch.external).sum()
    if batch.logprobs_ref is not None:
        sums["kl"] = (kl_estimate(logprobs, batch.logprobs_ref, "k3") * mask).sum()
    return sums


def resolve(rl: Rl, max_length: int | None = None) -> Algorithm:
    """The algorithm that section `rl` describes, with a new state; `max_length`: model.max_length. Raises ParamsError for
    switches that would have no effect, and for invalid combinations."""
    method, resolved = resolve_section(rl, max_length)
    return Algorithm(method, resolved, method.state() if method.state is not None else {})
