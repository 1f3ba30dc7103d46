"""The RL side of the training loop: one batch of episodes becomes the optimiser updates of policy and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from stages.agent.policy import score_tokens
from stages.algorithms.aggregation import denominators
from stages.algorithms.compose import Algorithm
from stages.algorithms.contract import Denominators, LossTerms, TrajectoryBatch
from stages.algorithms.filling import forward_rows
from stages.seeding import permutation
from stages.training.batches import minibatches, take
from stages.training.ledger import Ledger
from stages.training.loop import Sums, Update
from stages.training.models import Models

LOGPROB_TOLERANCE = 1e-5
"""Sampling and training log-probs agree if they differ by no more than this on average; tokens beyond it are counted ..."""
LARGEST_DIFFERENCE = 1e-4
"""... and may differ by no more than this: in float32 either forward pass is up to about 1e-5 away from float64."""


class PolicyUpdates:
    """Makes the updates of one training step; see `updates`. `constant_length`: the divisor of loss.aggregation constant."""

    def __init__(self, models: Models, algorithm: Algorithm, ledger: Ledger, constant_length: int) -> None:
        self.models, self.algorithm, self.ledger = models, algorithm, ledger
        self.constant_length = float(constant_length)

    def updates(self, batch: TrajectoryBatch, step: int, key: Sequence[object]) -> Iterator[Update]:
        """Epochs of minibatches of whole groups over a prepared batch: for each the critic's update, then the policy's, unless
        `critic.warmup_steps` are not over. `key` orders the groups when there are several minibatches.

        Denominators are each minibatch's, dropped groups included (but not rows of weight 0). The step's first policy update
        is on-policy; it measures how sampling and training log-probs differ (see `agreement`).
        """
        rl = self.algorithm.rl
        count = rl.minibatches or 1
        kept = set(self.algorithm.forward_rows(batch).tolist())
        valued = set(forward_rows(batch, "keep").tolist())
        dropped = torch.tensor([row not in kept for row in range(batch.size)])
        groups = list(dict.fromkeys(batch.group.tolist()))
        policy_learns = self.models.critic is None or step >= (rl.critic.warmup_steps or 0)
        on_policy = True
        for epoch in range(rl.epochs):
            order = permutation(groups, *key, epoch) if count > 1 else groups
            if policy_learns:
                self.ledger.open(batch.mask, dropped, batch.external)
            for rows in minibatches(batch.group, count, order):
                total = denominators(batch.rows(torch.tensor(rows)), self.constant_length)
                judged = [row for row in rows if row in valued]
                if self.models.critic is not None and judged:
                    yield self._critic_update(batch, self.models.plan(batch, judged), total)
                trained = [row for row in rows if row in kept]
                if policy_learns and trained:
                    yield self._policy_update(batch, trained, total, on_policy)
                    on_policy = False
            if policy_learns:
                self.ledger.close()

    def _policy_update(self, batch: TrajectoryBatch, rows: list[int], total: Denominators, on_policy: bool) -> Update:
        temperature, bonus = self.algorithm.rl.sampling.temperature, bool(self.algorithm.rl.loss.entropy_coef)
        model = self.models.policy

        def loss(rows: list[int]) -> Iterator[LossTerms]:
            """The rows' share of the loss."""
            micro = take(batch, rows, model.device)
            scores = score_tokens(
                *(model, micro.token_ids, micro.mask, temperature),
                states=self.models.states,
                entropy=True,
                entropy_gradient=bonus,
                vocabulary=self.algorithm.needs_vocabulary,
            )
            logprobs = scores.logprobs
            assert scores.entropy is not None
            terms = self.algorithm.loss(logprobs, scores.entropy, micro, total, scores.vocabulary)
            terms = replace(terms, trained=(torch.tensor(rows), micro.mask))
            if on_policy:
                drawn = micro.logprobs_old if micro.logprobs_drawn is None else micro.logprobs_drawn
                difference = ((logprobs.detach() - drawn) * micro.own).abs()
                terms.sums["max_logprob_difference"] = difference.max()
                terms.sums["logprob_difference"], terms.sums["logprob_tokens"] = difference.sum(), micro.own.sum()
                terms.sums["logprobs_apart"] = (difference > LOGPROB_TOLERANCE).sum()
            yield terms

        return Update("policy", self.models.plan_training(batch, rows), loss, self.ledger.saw)

    def _critic_update(self, batch: TrajectoryBatch, plan: list[list[int]], total: Denominators) -> Update:
        critic, coef = self.models.critic, self.algorithm.rl.critic.coef
        assert critic is not None
        assert coef is not None, "resolve the parameters first"

        def loss(rows: list[int]) -> Iterator[LossTerms]:
            micro = take(batch, rows, critic.output.weight.device)
            assert micro.returns is not None
            weights = micro.weights[:, None].expand(micro.mask.shape)[micro.mask]
            per_token, values = critic.loss(micro.token_ids, micro.mask, micro.returns)
            share = (per_token * weights).sum() / total.tokens
            returns = micro.returns[micro.mask].double()
            sums = {"loss": share.detach(), "tokens": weights.sum(), "outside": (critic.head.outside(returns) * weights).sum()}
            sums |= {"error": ((values - returns).square() * weights).sum(), "returns": (returns * weights).sum()}
            yield LossTerms(coef * share, {**sums, "squares": (returns.square() * weights).sum()})

        return Update("critic", plan, loss)


def agreement(policy: Mapping[str, float]) -> dict[str, float]:
    """How far sampling and training log-probs of the same weights are apart, from the policy's statistics of one step: the
    largest and the mean absolute difference, and the share of tokens that differ by more than LOGPROB_TOLERANCE."""
    tokens = max(policy.get("logprob_tokens", 0.0), 1.0)
    return {
        "max_logprob_difference": policy.get("max_logprob_difference", 0.0),
        "mean_logprob_difference": policy.get("logprob_difference", 0.0) / tokens,
        "logprobs_apart": policy.get("logprobs_apart", 0.0) / tokens,
    }


def check_agreement(measured: Mapping[str, float], precision: str, step: int) -> None:
    """Raise ValueError if, in float32, sampling and training log-probs part; `measured` is what `agreement` returns."""
    mean, largest = measured["mean_logprob_difference"], measured["max_logprob_difference"]
    if precision == "float32" and (mean > LOGPROB_TOLERANCE or largest > LARGEST_DIFFERENCE):
        raise ValueError(
            f"step {step + 1}: sampling and training log-probs differ by {mean:.2g} on average (at most {LOGPROB_TOLERANCE:g}) "
            f"and by {largest:.2g} at the most (at most {LARGEST_DIFFERENCE:g}), {measured['logprobs_apart']:.2%} of the tokens "
            f"by more than {LOGPROB_TOLERANCE:g}: the engine and the training pass must compute the same model: check that "
            f"both use the same weights and temperature, and that the model has no dropout or state of its own"
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
        if policy.get("external_tokens"):
            row["external_probability"] = policy["external_probability"] / policy["external_tokens"]
    utterances = sums.get("utterances")
    if utterances:
        turns = max(utterances["turns"], 1.0)
        row |= {
            "utterance_loss": utterances["loss"] / utterances["updates"],
            "utterance_grad_norm": utterances["grad_norm"] / utterances["updates"],
            "td_error": utterances["td_error"] / turns,
            "utterance_clamped": utterances["outside"] / turns,
        }
    critic = sums.get("critic")
    if critic:
        row |= {"critic_loss": critic["loss"] / critic["updates"], "critic_grad_norm": critic["grad_norm"] / critic["updates"]}
        tokens = max(critic["tokens"], 1.0)
        variance = critic["squares"] / tokens - (critic["returns"] / tokens) ** 2
        row["critic_mse"] = critic["error"] / tokens
        row["critic_explained_variance"] = 1.0 - row["critic_mse"] / variance if variance > 1e-12 else 0.0
        row["critic_clamped"] = critic["outside"] / tokens
    return row
