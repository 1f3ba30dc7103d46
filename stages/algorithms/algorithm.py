"""Puts a method together: `rl.algorithm` names a composition, every key the user set overrides its part.

algorithm = resolve(params.section("rl", domain), params.model.max_length)
plan = algorithm.plan(vocabulary)                           # how the episodes of a group are played
batch = algorithm.shape(batch)                              # reward shaping, over the whole batch
while algorithm.missing_groups(batch): ...                         # further tasks are played, where filling asks for them
batch = algorithm.resample(batch, *key)                        # which groups count, and how often
batch = algorithm.prepare(batch)                            # advantages and step credit
total = denominators(minibatch, ...)                        # before micro-batching
terms = algorithm.loss(logprobs, entropy, micro, total)     # a share of the loss
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.agent.branching import Plan
from stages.agent.logprobs import Vocabulary
from stages.algorithms.batch import LossTerms, TrajectoryBatch
from stages.algorithms.card import Card, Composition
from stages.algorithms.parts import advantage, group_resampling, horizon, whole_groups
from stages.algorithms.parts.branching import EntropyPlan
from stages.algorithms.parts.credit import add_credit
from stages.algorithms.parts.critic import needs_critic
from stages.algorithms.parts.external import external_loss
from stages.algorithms.parts.gae import gae_advantage
from stages.algorithms.parts.loss import LOSSES, Denominators, Loss, aggregate, clipped, kl_estimate, log_ratio
from stages.algorithms.parts.progress import progress_rewards
from stages.algorithms.parts.reward import kl_penalty, shape_rewards
from stages.algorithms.parts.turn_critic import turn_critic_advantage
from stages.algorithms.resolve import resolve_section
from stages.algorithms.settings import Rl


@dataclass(frozen=True)
class Algorithm:
    """A method with every switch decided. `rl`: the resolved section; `settings` in it is the method's own model."""

    method: Composition
    rl: Rl

    @property
    def card(self) -> Card:
        return self.method.card

    @property
    def needs_critic(self) -> bool:
        """Whether batches need a critic's `values` of tokens."""
        return self.method.data != "pairs" and needs_critic(self.rl)

    @property
    def needs_turn_critic(self) -> bool:
        """Whether batches need `turn_q` and `turn_v`, by a critic of utterances that learns from replayed episodes."""
        return self.method.data != "pairs" and self.rl.advantage.estimator == "utterance"

    @property
    def needs_reference(self) -> bool:
        """Whether batches need `logprobs_ref` for training (reports take a sample of them in any case)."""
        own = self.method.reference is not None and self.method.reference(self.rl)
        return own or self.rl.loss.kl_coef > 0 or self.rl.reward.kl_coef > 0

    @property
    def needs_vocabulary(self) -> bool:
        """Whether its loss looks at the policy's whole distribution before each token."""
        return self._own_loss(self.method.vocabulary)

    @property
    def needs_rescoring(self) -> bool:
        """Whether the training pass computes log-probabilities before the step anew."""
        return self._own_loss(self.method.rescored)

    @property
    def compares_with_old(self) -> bool:
        """Whether its loss compares log-probabilities with those before the step's first update (a method's own loss may)."""
        return self.rl.loss.kind != "policy_gradient" or self.external_per_group > 0

    def _own_loss(self, needs: Callable[[Rl], bool] | None) -> bool:
        return needs is not None and self.rl.loss.kind == "own" and needs(self.rl)

    @property
    def needs_progress(self) -> bool:
        """Whether batches need the progress estimator's `turn_progress`."""
        return self.rl.credit.kind == "progress" and self.rl.credit.step_reward == "spa"

    @property
    def whole_groups(self) -> bool:
        """Whether a micro-batch must hold all or none of a group's rows."""
        return self.method.whole_groups and self.rl.loss.kind == "own"

    @property
    def external_per_group(self) -> int:
        """How many episodes of each group are to be demonstrations."""
        return self.rl.external.per_group

    @property
    def needs_greedy(self) -> bool:
        """Whether each task needs a greedy episode beside its group."""
        return self.rl.advantage.mean == "greedy"

    def turn_limit(self, step: int, longest: int) -> int | None:
        """Turns that an episode of step `step` (from 0) may take, None for what the environment allows, which is `longest`."""
        return None if self.rl.horizon.kind == "environment" else horizon.turn_limit(self.rl.horizon, step, longest)

    def plan(self, vocabulary: int) -> Plan | None:
        """How a group's episodes are played, where some of them may be branches of others; `vocabulary`: size of the policy's."""
        branching = self.rl.branching
        if branching.kind == "own":
            return self.method.pieces["branching"](self.rl)
        return None if branching.kind == "none" else EntropyPlan(branching, vocabulary)

    def shape(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The batch with shaped rewards."""
        if self.rl.reward.kind == "own":
            batch = self.method.pieces["reward"](batch, self.rl)
        return shape_rewards(batch, self.rl.reward)

    def missing_groups(self, batch: TrajectoryBatch) -> int:
        """How many further tasks to play so that a shaped batch has enough groups (at most `group_resampling.rounds` times)."""
        return group_resampling.missing_groups(batch, self.rl.group_resampling, self.rl.tasks_per_step)

    def resample(self, batch: TrajectoryBatch, *key: object) -> TrajectoryBatch:
        """The shaped batch with the rows' `weight` and `smoothing`, where groups are resampled; `key`: of the random draws."""
        if self.rl.group_resampling.kind == "own":
            return self.method.pieces["group_resampling"](batch, self.rl)
        return group_resampling.resample(batch, self.rl.group_resampling, self.rl.tasks_per_step, self.rl.reward.prs, *key)

    def prepare(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The batch with `advantages` (and `returns` where there is a critic), step credit included."""
        batch = kl_penalty(batch, self.rl.reward)
        if self.rl.credit.kind == "progress":
            batch = progress_rewards(batch, self.rl.credit)
        estimator = self.rl.advantage.estimator
        if estimator == "own":
            batch = self.method.pieces["advantage"](batch, self.rl)
        elif estimator == "gae":
            batch = gae_advantage(batch, self.rl.advantage)
        elif estimator == "utterance":
            batch = turn_critic_advantage(batch, self.rl.advantage)
        else:
            batch = advantage.group_advantage(batch, self.rl.advantage)
        batch = advantage.finish(batch, self.rl.advantage)
        if self.rl.credit.kind == "own":
            batch = self.method.pieces["credit"](batch, self.rl)
        batch = group_resampling.mask_overlong(add_credit(batch, self.rl.credit), self.rl.group_resampling)
        return whole_groups.count_members(batch) if self.whole_groups else batch

    def forward_rows(self, batch: TrajectoryBatch) -> Tensor:
        """Indices [b] int64 of a prepared batch's rows that have to go through the policy."""
        loss = self.rl.loss
        imitates = self.external_per_group > 0 and self.rl.external.loss == "sft"
        proportional = not loss.kl_coef and not loss.entropy_coef and loss.kind != "own" and not imitates
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

        logprobs, entropy: [b, T] under the current policy, 0 off the mask; `batch` holds the same rows; `total` is the
        optimiser step's; `vocabulary`: where the method needs it. `sums` adds up over micro-batches, save `max_ratio`, which is a
        maximum. Raises ValueError if the method needs whole groups and the micro-batch splits one.
        """
        params = self.rl.loss
        if self.whole_groups:
            whole_groups.check_whole(batch)
        if params.kind == "own":
            whole = (vocabulary,) if self.needs_vocabulary else ()
            per_token = self.method.pieces["loss"](logprobs, batch, self.rl, *whole)
        else:
            per_token = LOSSES[params.kind](logprobs, batch, params)
        if batch.external is not None:
            per_token = torch.where(batch.external, external_loss(logprobs, batch, self.rl.external), per_token)
        if params.kl_coef:
            if batch.logprobs_ref is None:
                raise ValueError("rl.loss.kl_coef is above 0 and the batch has no reference log-probabilities")
            kl = kl_estimate(logprobs, batch.logprobs_ref, params.kl_estimator)
            # The estimators hold for samples of the policy's own.
            per_token = per_token + params.kl_coef * kl * batch.policy_mask
        bonus, apart = params.entropy_coef * entropy, params.entropy_aggregation == "token_mean"
        if params.entropy_coef and not apart:
            per_token = per_token - bonus
        loss = aggregate(per_token, batch.mask, params.aggregation, total, batch.weight)
        if params.entropy_coef and apart:
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
    if batch.external is not None:
        sums["external_tokens"] = batch.external.sum()
        sums["external_probability"] = (logprobs.exp() * batch.external).sum()
    if batch.logprobs_ref is not None:
        sums["kl"] = (kl_estimate(logprobs, batch.logprobs_ref, "k3") * mask).sum()
    return sums


def resolve(rl: Rl, max_length: int | None = None) -> Algorithm:
    """The algorithm that section `rl` stands for; `max_length`: model.max_length. Raises ParamsError for switches that would have
    no effect or no meaning."""
    return Algorithm(*resolve_section(rl, max_length))
