"""The RL side of the training loop: one batch of episodes becomes the optimiser updates of policy and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stages.agent.policy import token_logprobs
from stages.algorithms.aggregation import denominators
from stages.algorithms.compose import Algorithm
from stages.algorithms.contract import Denominators, LossTerms, TrajectoryBatch
from stages.algorithms.filling import forward_rows
from stages.params import Critic as CriticParams
from stages.seeding import permutation
from stages.training.batches import minibatches, plan_micro_batches, take, trained_lengths
from stages.training.critic import Critic
from stages.training.ledger import Ledger
from stages.training.loop import Sums, Update

LOGPROB_TOLERANCE = 1e-5


def micro_plan(batch: TrajectoryBatch, rows: Sequence[int] | Tensor, tokens_per_batch: int) -> list[list[int]]:
    """Rows of the batch in micro-batches of similar trained length."""
    rows = [int(row) for row in rows]
    lengths = trained_lengths(batch.mask).tolist()
    return [[rows[place] for place in group] for group in plan_micro_batches([lengths[row] for row in rows], tokens_per_batch)]


@torch.no_grad()
def reference_logprobs(model: Any, batch: TrajectoryBatch, temperature: float, tokens_per_batch: int, rows: Tensor) -> Tensor:
    """Log-probabilities [B, T] under the frozen reference on the policy tokens of `rows`, 0 elsewhere."""
    result = torch.zeros(batch.mask.shape)
    for plan in micro_plan(batch, rows, tokens_per_batch):
        micro = take(batch, plan, model.device)
        logprobs, _ = token_logprobs(model, micro.token_ids, micro.mask, temperature)
        result[torch.tensor(plan), : logprobs.shape[1]] = logprobs.cpu()
    return result


def critic_values(critic: Critic, batch: TrajectoryBatch, tokens_per_batch: int) -> Tensor:
    """The critic's values [B, T] before each policy token, 0 elsewhere."""
    result = torch.zeros(batch.mask.shape)
    device = critic.output.weight.device
    for plan in micro_plan(batch, torch.arange(batch.size), tokens_per_batch):
        micro = take(batch, plan, device)
        values = critic.values(micro.token_ids, micro.mask)
        result[torch.tensor(plan), : values.shape[1]] = values.cpu()
    return result


class PolicyUpdates:
    """Makes the updates of one training step; see `updates`."""

    def __init__(
        self, algorithm: Algorithm, model: Any, critic: Critic | None, ledger: Ledger, tokens_per_batch: int, constant_length: int
    ) -> None:
        self.algorithm, self.model, self.critic = algorithm, model, critic
        self.ledger, self.tokens_per_batch = ledger, tokens_per_batch
        self.constant_length = float(constant_length)

    def updates(self, batch: TrajectoryBatch, step: int, key: Sequence[object]) -> Iterator[Update]:
        """Epochs of minibatches of whole groups over a prepared batch: for each the critic's update, then the policy's, unless
        `critic.warmup_steps` are not over. `key` orders the groups when there are several minibatches.

        The first policy update of the step is on-policy; it measures `max_logprob_difference`.
        """
        rl = self.algorithm.rl
        kept = set(forward_rows(batch, rl.dead_groups).tolist())
        dropped = torch.tensor([row not in kept for row in range(batch.size)])
        groups = list(dict.fromkeys(batch.group.tolist()))
        policy_learns = self.critic is None or step >= rl.critic.warmup_steps
        on_policy = True
        for epoch in range(rl.epochs):
            order = permutation(groups, *key, epoch) if rl.minibatches > 1 else groups
            if policy_learns:
                self.ledger.open(batch.mask, dropped)
            for rows in minibatches(batch.group, rl.minibatches, order):
                total = denominators(batch.rows(torch.tensor(rows)), self.constant_length)
                plan = micro_plan(batch, [row for row in rows if row in kept], self.tokens_per_batch)
                if self.critic is not None:
                    yield self._critic_update(batch, micro_plan(batch, rows, self.tokens_per_batch), total, rl.critic)
                if policy_learns and plan:
                    yield self._policy_update(batch, plan, total, on_policy)
                    on_policy = False
            if policy_learns:
                self.ledger.close()

    def _policy_update(self, batch: TrajectoryBatch, plan: list[list[int]], total: Denominators, on_policy: bool) -> Update:
        rl = self.algorithm.rl

        def loss(rows: list[int]) -> LossTerms:
            micro = take(batch, rows, self.model.device)
            logprobs, entropy = token_logprobs(self.model, micro.token_ids, micro.mask, rl.sampling.temperature, entropy=True)
            assert entropy is not None
            self.ledger.saw(torch.tensor(rows), micro.mask)
            terms = self.algorithm.loss(logprobs, entropy, micro, total)
            if on_policy:
                difference = ((logprobs.detach() - micro.logprobs_old) * micro.mask).abs().max()
                terms.sums["max_logprob_difference"] = difference
            return terms

        return Update("policy", plan, loss)

    def _critic_update(self, batch: TrajectoryBatch, plan: list[list[int]], total: Denominators, params: CriticParams) -> Update:
        critic = self.critic
        assert critic is not None

        def loss(rows: list[int]) -> LossTerms:
            micro = take(batch, rows, critic.output.weight.device)
            assert micro.returns is not None
            share = critic.loss(micro.token_ids, micro.mask, micro.returns).sum() / total.tokens
            return LossTerms(params.coef * share, {"loss": share.detach()})

        return Update("critic", plan, loss)


def explained_variance(batch: TrajectoryBatch) -> float:
    """1 - Var(returns - values) / Var(returns) over the policy tokens; 0 if the returns do not vary."""
    assert batch.returns is not None
    assert batch.values is not None
    returns, values = batch.returns[batch.mask], batch.values[batch.mask]
    variance = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / variance if variance > 1e-12 else 0.0


def check_logprobs(difference: float, precision: str, step: int) -> None:
    """Raise ValueError if, in float32, sampling and training log-probabilities of the same weights differ by more than 1e-5."""
    if precision == "float32" and difference > LOGPROB_TOLERANCE:
        raise ValueError(
            f"step {step + 1}: sampling and training log-probabilities differ by {difference:.2g} (at most {LOGPROB_TOLERANCE:g}). The "
            f"engine and the training forward pass must compute the same model: check that both use the same weights and temperature, "
            f"and that the model has no dropout or state of its own"
        )


def policy_row(sums: Mapping[str, Sums]) -> dict[str, float]:
    """The history's columns about the optimiser's work, from one step's statistics by learner."""
    row: dict[str, float] = {}
    policy = sums.get("policy")
    if policy:
        tokens, updates = max(policy["tokens"], 1.0), policy["updates"]
        row = {
            "loss": policy["loss"] / updates,
            "entropy": policy["entropy"] / tokens,
            "clip_fraction": policy["clipped"] / tokens,
            "grad_norm": policy["grad_norm"] / updates,
            "ratio_mean": policy["ratio"] / tokens,
            "ratio_max": policy["max_ratio"],
        }
    critic = sums.get("critic")
    if critic:
        row |= {"critic_loss": critic["loss"] / critic["updates"], "critic_grad_norm": critic["grad_norm"] / critic["updates"]}
    return row
