"""The RL side of the training loop: one batch of episodes becomes the optimiser updates of policy and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stages.agent.logprobs import score_tokens
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import LossTerms, TrajectoryBatch
from stages.algorithms.parts.group_resampling import forward_rows
from stages.algorithms.parts.loss import Denominators, denominators
from stages.seeding import permutation
from stages.training.batches import minibatches, take
from stages.training.ledger import Ledger
from stages.training.loop import Sums, Update
from stages.training.rl.models import Models

LOGPROB_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
"""By resources.precision: sampling and training log-probs agree if they differ by no more than this on average; tokens beyond it
are counted ..."""
LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 2.0}
"""... and may differ by no more than this. In float32 either forward pass is up to about 1e-5 away from float64. In bfloat16 the
engine plays with the weights as they are stored and training computes under autocast: with the shipped model log-probs differ by
0.010 to 0.019 on average and 0.2 at the most; a wrong temperature, position or weight costs more than the bounds."""
RESCORING_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-4}
"""Log-probs from before a step's first update, where the training pass computes them, and those of that update differ by no more
than this on average: equal weights, equal kernels. A third of the range in which GSPO does not clip."""


class PolicyUpdates:
    """Makes the updates of one training step; see `updates`. `constant_length`: the divisor of loss.aggregation constant."""

    def __init__(self, models: Models, algorithm: Algorithm, ledger: Ledger, constant_length: int) -> None:
        self.models, self.algorithm, self.ledger = models, algorithm, ledger
        self.precision = "bfloat16" if models.processes.mixed else "float32"
        self.constant_length = float(constant_length)

    def rescored(self, batch: TrajectoryBatch, step: int, key: Sequence[object]) -> TrajectoryBatch:
        """The prepared batch as `updates` is to have it. In mixed precision, for losses that compare, `logprobs_old` are computed
        anew: for each row in the micro-batch, and by the kernels, in which the first epoch trains it. The engine's would be off
        by more than a ratio of whole episodes may move, and so would those of another micro-batch."""
        if not (self.models.processes.mixed and self.algorithm.compares_with_old and self._policy_learns(step)):
            return batch
        kept, plan = set(self.algorithm.forward_rows(batch).tolist()), []
        for rows in self._minibatches(batch, 0, key):
            trained = [row for row in rows if row in kept]
            plan += self.models.plan_training(batch, trained) if trained else []
        return self.models.rescored(batch, plan, self.algorithm, trained=True) if plan else batch

    def _policy_learns(self, step: int) -> bool:
        return self.models.critic is None or step >= self.algorithm.rl.critic.warmup_steps

    def _minibatches(self, batch: TrajectoryBatch, epoch: int, key: Sequence[object]) -> list[list[int]]:
        # Groups that count nowhere would leave some minibatches with nothing to learn from, and cost their optimiser steps.
        groups = list(dict.fromkeys(batch.group[forward_rows(batch)].tolist()))
        count = self.algorithm.rl.minibatches
        return minibatches(batch.group, count, permutation(groups, *key, epoch) if count > 1 else groups)

    def updates(self, batch: TrajectoryBatch, step: int, key: Sequence[object], on_policy: bool = True) -> Iterator[Update]:
        """Epochs of minibatches of whole groups (those that count) over a prepared batch: for each the critic's update, then the
        policy's, unless `critic.warmup_steps` are not over. `key` orders the groups when there are several minibatches.

        Denominators are each minibatch's, dropped groups included (but not rows of weight 0). The first policy update, unless
        `on_policy` is False, has the weights that the batch is from; it measures how sampling and training log-probs differ (see
        `agreement`).
        """
        rl = self.algorithm.rl
        kept = set(self.algorithm.forward_rows(batch).tolist())
        valued = set(forward_rows(batch).tolist())
        dropped = torch.tensor([row not in kept for row in range(batch.size)])
        policy_learns = self._policy_learns(step)
        for epoch in range(rl.epochs):
            if policy_learns:
                self.ledger.open(batch.mask, dropped, batch.external)
            for rows in self._minibatches(batch, epoch, key):
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
                terms.sums.update(self._differences(logprobs.detach(), micro))
            yield terms

        return Update("policy", self.models.plan_training(batch, rows), loss, self.ledger.saw)

    def _differences(self, logprobs: Tensor, micro: TrajectoryBatch) -> dict[str, Tensor]:
        """How log-probabilities [b, T] of the step's first update differ from those that the engine drew with, and from those of
        an earlier training pass where there was one: the sums that `agreement` reads."""
        drawn = micro.logprobs_old if micro.logprobs_drawn is None else micro.logprobs_drawn
        difference = ((logprobs - drawn) * micro.policy_mask).abs()
        sums = {"max_logprob_difference": difference.max(), "logprob_difference": difference.sum()}
        sums |= {
            "logprob_tokens": micro.policy_mask.sum(),
            "logprobs_apart": (difference > LOGPROB_TOLERANCE[self.precision]).sum(),
        }
        if micro.logprobs_drawn is not None:
            again = ((logprobs - micro.logprobs_old) * micro.policy_mask).abs()
            sums |= {"max_rescored_difference": again.max(), "rescored_difference": again.sum()}
        return sums

    def _critic_update(self, batch: TrajectoryBatch, plan: list[list[int]], total: Denominators) -> Update:
        critic, coef = self.models.critic, self.algorithm.rl.critic.coef
        assert critic is not None

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
    largest and the mean absolute difference, and the share of tokens that differ by more than LOGPROB_TOLERANCE; and, where the
    training pass has computed log-probs anew, how far these are from the first update's."""
    tokens = max(policy.get("logprob_tokens", 0.0), 1.0)
    found = {
        "max_logprob_difference": policy.get("max_logprob_difference", 0.0),
        "mean_logprob_difference": policy.get("logprob_difference", 0.0) / tokens,
        "logprobs_apart": policy.get("logprobs_apart", 0.0) / tokens,
    }
    if "rescored_difference" in policy:
        found["max_rescored_difference"] = policy["max_rescored_difference"]
        found["mean_rescored_difference"] = policy["rescored_difference"] / tokens
    return found


def check_agreement(measured: Mapping[str, float], precision: str, step: int) -> None:
    """Raise ValueError if log-probs of the same weights differ by more than rounding in `precision` explains: those of sampling
    from those of training, or those of two training passes; `measured` is what `agreement` returns."""
    mean, largest = measured["mean_logprob_difference"], measured["max_logprob_difference"]
    tolerance, limit = LOGPROB_TOLERANCE[precision], LARGEST_DIFFERENCE[precision]
    # Written so that numbers that are none fail, too.
    if not (mean <= tolerance and largest <= limit):
        raise ValueError(
            f"step {step + 1}: sampling and training log-probs differ by {mean:.2g} on average (at most {tolerance:g}) "
            f"and by {largest:.2g} at the most (at most {limit:g}), {measured['logprobs_apart']:.2%} of the tokens "
            f"by more than {tolerance:g}: the engine and the training pass must compute the same model: check that "
            f"both use the same weights and temperature, and that the model has no dropout or state of its own"
        )
    again = measured.get("mean_rescored_difference", 0.0)
    if not again <= RESCORING_TOLERANCE[precision]:
        raise ValueError(
            f"step {step + 1}: log-probs that the training pass has computed before the step's first update differ by "
            f"{again:.2g} on average (at most {RESCORING_TOLERANCE[precision]:g}) from those of that update, which has the same "
            f"weights: check that the model has no dropout or state of its own, or set resources.precision to float32"
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
