"""From a batch of episodes to the optimiser updates of policy and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.agent.logprobs import score_tokens
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import LossTerms, TrajectoryBatch, Written
from stages.algorithms.parts.group_resampling import forward_rows
from stages.algorithms.parts.loss import Denominators, denominators
from stages.seeding import permutation
from stages.training.common.batches import minibatches, take, turn_starts
from stages.training.common.hidden import seen
from stages.training.common.kept import kept_of
from stages.training.common.ledger import Ledger
from stages.training.common.loop import Sums, Update
from stages.training.rl.models import Models
from stages.training.rl.observation import observed_tokens, observed_weight, on_policy_tokens, with_observations
from stages.values.gaussian import GaussianHead

if TYPE_CHECKING:
    from stages.training.rl.team import Team

LOGPROB_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
"""By resources.precision: the largest accepted mean difference of sampling and training log-probs; tokens that differ by more are
counted ..."""
LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 2.0}
"""... and the largest accepted difference of a token. In float32, either forward pass is within about 1e-5 of float64. In
bfloat16, the engine plays with the stored weights and training runs under autocast: with the shipped model, log-probs differ by
0.010 to 0.019 on average and by 0.2 at most. A wrong temperature, position or weight exceeds these bounds."""
USUAL_SIZE = 10.0
"""The largest absolute log-prob up to which LARGEST_DIFFERENCE holds. Beyond it, the bound grows in proportion: rounding errors
are proportional to the logits, which a run that diverges makes ever larger."""
RESCORING_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-4}
"""The largest accepted mean difference of the training pass's log-probs before and in a step's first update: same weights, same
kernels. A third of the range in which GSPO does not clip."""


@dataclass(frozen=True)
class Agent:
    """Weights that a policy update trains, and its rows of the batch."""

    learner: str
    models: Models
    rows: list[int]


class PolicyUpdates:
    """Makes the updates of a training step."""

    def __init__(
        self,
        models: Models,
        algorithm: Algorithm,
        ledger: Ledger,
        team: Team | None = None,
        first: bool = False,
        recorded: bool = False,
    ) -> None:
        """team: where the batch's rows belong to several agents. first: no other update of a step comes before. recorded: all
        batches were drawn by the run's start policy, with whose log-probabilities the losses compare."""
        self.recorded = recorded
        self.models, self.algorithm, self.ledger, self.team = models, algorithm, ledger, team
        self.precision = "bfloat16" if models.processes.mixed_precision else "float32"
        rl = algorithm.rl
        self.compares = models.processes.mixed_precision and algorithm.compares_with_old and not recorded
        """Whether log-probs of the training pass replace the engine's, as those of the step's first update."""
        other = team is not None or algorithm.needs_rescoring or algorithm.needs_turn_critic  # may train on older episodes
        self.in_passing = self.compares and first and not other and rl.epochs == rl.minibatches == 1
        """Whether the update itself finds them: it is the batch's only one, with the weights that they are of."""

    def rescored(self, batch: TrajectoryBatch, step: int, key: Sequence[object]) -> TrajectoryBatch:
        """The prepared batch for `updates`.

        In mixed precision, `logprobs_old` are recomputed for losses that compare with them: each row in the micro-batch, and with
        the kernels, of its first training pass. Those of the engine or of another micro-batch would differ by more than the clip
        range of sequence-level ratios. Where that pass is the batch's only one, it finds them itself.
        """
        if not (self.compares and self.policy_learns(step)) or self.in_passing:
            return batch
        kept, plans = self._kept(batch, step), dict[str, tuple[Models, list[list[int]]]]()
        for rows in self._minibatches(batch, 0, key):
            for agent in self._agents(batch, [row for row in rows if row in kept]):
                plan = plans.setdefault(agent.learner, (agent.models, []))[1]
                plan += agent.models.plan_training(batch, agent.rows)
        for models, plan in plans.values():
            batch = models.rescored(batch, plan, self.algorithm, trained=True)
        return batch

    def _kept(self, batch: TrajectoryBatch, step: int) -> set[int]:
        """Rows that go through the policy in step `step`."""
        kept = set(self.algorithm.forward_rows(batch).tolist())
        return kept if self.team is None else kept - self.team.frozen_rows(batch, step)

    def _agents(self, batch: TrajectoryBatch, rows: list[int]) -> Iterator[Agent]:
        """Whose weights `rows` train."""
        if self.team is not None:
            yield from self.team.agents(batch, rows)
        elif rows:
            yield Agent("policy", self.models, rows)

    def policy_learns(self, step: int) -> bool:
        """Whether step `step` trains the policy: not while only the critic warms up."""
        return self.models.critic is None or step >= self.algorithm.rl.critic.warmup_steps

    def _minibatches(self, batch: TrajectoryBatch, epoch: int, key: Sequence[object]) -> list[list[int]]:
        # Groups with weight 0 could leave a minibatch without anything to learn from, at the cost of an optimiser step.
        groups = list(dict.fromkeys(batch.group[forward_rows(batch)].tolist()))
        count = self.algorithm.rl.minibatches
        return minibatches(batch.group, count, permutation(groups, *key, epoch) if count > 1 else groups)

    def updates(self, batch: TrajectoryBatch, step: int, key: Sequence[object], on_policy: bool = True) -> Iterator[Update]:
        """Epochs over a prepared batch in minibatches of whole groups with weight: for each, the critic's update, then the
        policy's (after `critic.warmup_steps`). `key` orders the groups if there are several minibatches.

        Denominators are those of the minibatch, including dropped groups but not rows of weight 0. If `on_policy`, the first
        policy update has the weights that drew the batch, and measures how sampling and training log-probs differ (see
        `agreement`).
        """
        rl = self.algorithm.rl
        kept = self._kept(batch, step)
        valued = set(forward_rows(batch).tolist())
        dropped = torch.tensor([row not in kept for row in range(batch.size)])
        policy_learns, updated = self.policy_learns(step), set[str]()
        on_policy = on_policy and not (self.recorded and step)
        for epoch in range(rl.epochs):
            if policy_learns:
                observed = observed_tokens(batch) if rl.observation.coef else None
                written = batch.get(Written)
                self.ledger.open(batch.mask, dropped, batch.external, observed, None if written is None else written.owner)
            for rows in self._minibatches(batch, epoch, key):
                total = self._denominators(batch, rows)
                critic_rows = [row for row in rows if row in valued]
                if self.models.critic is not None and critic_rows:
                    yield self._critic_update(batch, self.models.plan(batch, critic_rows), total)
                for agent in self._agents(batch, [row for row in rows if row in kept] if policy_learns else []):
                    share = total if self.team is None else self._denominators(batch, self.team.rows_of(batch, agent, rows))
                    yield self._policy_update(batch, agent, share, on_policy and agent.learner not in updated)
                    updated.add(agent.learner)
            if policy_learns:
                self.ledger.close()

    def _denominators(self, batch: TrajectoryBatch, rows: Sequence[int]) -> Denominators:
        return denominators(batch.rows(torch.tensor(rows)), self.algorithm.rl.loss.constant_length)

    def _policy_update(self, batch: TrajectoryBatch, agent: Agent, total: Denominators, on_policy: bool) -> Update:
        rl, models = self.algorithm.rl, agent.models
        model, coef, limit = models.policy, rl.observation.coef, rl.loss.kl_stop
        observations = observed_weight(batch.rows(torch.tensor(agent.rows))) if coef else 0.0

        def loss(rows: list[int]) -> Iterator[LossTerms]:
            micro = take(batch, rows, model.device)
            scored = micro.mask | observed_tokens(micro) if coef else micro.mask
            found = score_tokens(
                *(model, micro.token_ids, scored, rl.sampling.temperature),
                states=seen(models.states, micro),
                entropy=True,
                entropy_gradient=bool(rl.loss.entropy_coef),
                vocabulary=self.algorithm.needs_vocabulary,
                kept=kept_of(micro),
            )
            scores = on_policy_tokens(found, micro.mask) if coef else found
            logprobs = scores.logprobs
            assert scores.entropy is not None
            differences = self._differences(logprobs.detach(), micro) if on_policy else {}
            if self.in_passing:
                micro = micro.with_(logprobs_old=torch.where(micro.mask, logprobs.detach(), micro.logprobs_old))
            terms = self.algorithm.loss(logprobs, scores.entropy, micro, total, scores.vocabulary)
            if coef:
                terms = with_observations(terms, found.logprobs, micro, observations, coef)
            terms = replace(terms, trained=(torch.tensor(rows), scored))
            terms.sums.update(differences)
            yield terms

        def drifted(sums: Sums) -> bool:
            assert limit is not None
            return sums["drift"] / max(sums["drift_units"], 1e-9) > limit

        skips = None if limit is None else drifted
        plan, ledger = models.plan_training(batch, agent.rows), self.ledger
        return Update(agent.learner, plan, loss, ledger.record, skips=skips, on_tokens_skipped=ledger.skip)

    def _differences(self, logprobs: Tensor, micro: TrajectoryBatch) -> dict[str, Tensor]:
        """How log-probabilities [b, T] of the step's first update differ from the engine's, and from those of an earlier training
        pass if there was one, as sums for `agreement`."""
        drawn = micro.logprobs_old if micro.logprobs_drawn is None else micro.logprobs_drawn
        difference = ((logprobs - drawn) * micro.policy_mask).abs()
        sums = {"max_logprob_difference": difference.max(), "logprob_difference": difference.sum()}
        sums |= {
            "max_logprob_size": (drawn * micro.policy_mask).abs().max(),
            "logprob_tokens": micro.policy_mask.sum(),
            "logprobs_apart": (difference > LOGPROB_TOLERANCE[self.precision]).sum(),
        }
        if micro.logprobs_drawn is not None and not self.in_passing:
            again = ((logprobs - micro.logprobs_old) * micro.policy_mask).abs()
            sums |= {"max_rescored_difference": again.max(), "rescored_difference": again.sum()}
        return sums

    def _critic_update(self, batch: TrajectoryBatch, plan: list[list[int]], total: Denominators) -> Update:
        """The critic learns where advantages read it: at every policy token, or at level turn at each turn's first."""
        critic, coef = self.models.critic, self.algorithm.rl.critic.coef
        assert critic is not None
        by_turn = self.algorithm.rl.advantage.level == "turn"

        def loss(rows: list[int]) -> Iterator[LossTerms]:
            micro = take(batch, rows, critic.output.weight.device)
            assert micro.returns is not None
            mask = turn_starts(micro) if by_turn else micro.mask
            weights = micro.weights[:, None].expand(mask.shape)[mask]
            params = self.algorithm.rl.critic
            limits = (micro.values, params.value_clip or None, params.huber_delta)
            per_token, values, spread = critic.loss(micro.token_ids, mask, micro.returns, *limits)
            share = (per_token * weights).sum() / (total.turns if by_turn else total.tokens)
            returns = micro.returns[mask].double()
            sums = {"loss": share.detach(), "tokens": weights.sum(), "outside": (critic.head.outside(returns) * weights).sum()}
            sums |= {"error": ((values - returns).square() * weights).sum(), "returns": (returns * weights).sum()}
            if spread is not None:
                sums["spread"] = (spread * weights).sum()
            yield LossTerms(coef * share, {**sums, "squares": (returns.square() * weights).sum()})

        def follow(sums: Sums) -> None:
            assert isinstance(critic.head, GaussianHead)
            critic.head.follow(torch.tensor([sums["spread"] / max(sums["tokens"], 1.0)]))

        return Update("critic", plan, loss, on_sums=follow if isinstance(critic.head, GaussianHead) else None)


def agreement(policy: Mapping[str, float]) -> dict[str, float]:
    """How sampling and training log-probs of the same weights differ, from the policy's statistics of one step.

    The largest and the mean absolute difference, and the fraction of tokens that differ by more than LOGPROB_TOLERANCE; and, if
    the training pass recomputed log-probs, how these differ from the first update's.
    """
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


def check_agreement(measured: Mapping[str, float], precision: str, step: int, size: float = 0.0) -> None:
    """Raise ValueError if `agreement`'s measurements exceed what rounding in `precision` explains. size: the largest absolute
    log-prob."""
    mean, largest = measured["mean_logprob_difference"], measured["max_logprob_difference"]
    tolerance, limit = LOGPROB_TOLERANCE[precision], LARGEST_DIFFERENCE[precision] * max(1.0, size / USUAL_SIZE)
    # Negated so that NaN fails, too.
    if not (mean <= tolerance and largest <= limit):
        raise ValueError(
            f"step {step + 1}: sampling and training log-probs differ by {mean:.2g} on average (limit {tolerance:g}) and by "
            f"{largest:.2g} at most (limit {limit:g}), {measured['logprobs_apart']:.2%} of the tokens by more than "
            f"{tolerance:g}; check that the engine and the training pass use the same weights and temperature, and that the "
            f"model has no dropout or internal state"
        )
    again = measured.get("mean_rescored_difference", 0.0)
    if not again <= RESCORING_TOLERANCE[precision]:
        raise ValueError(
            f"step {step + 1}: log-probs recomputed by the training pass differ by {again:.2g} on average (limit "
            f"{RESCORING_TOLERANCE[precision]:g}) from those of the first update, which has the same weights; check that the "
            f"model has no dropout or internal state, or set resources.precision to float32"
        )


def policy_row(sums: Mapping[str, Sums]) -> dict[str, float]:
    """The optimiser's columns of the history, from one step's statistics by learner."""
    row: dict[str, float] = {}
    policy = sums.get("policy")
    if policy and "tokens" in policy:
        tokens, updates = max(policy["tokens"], 1.0), policy["updates"]
        row = {
            "loss": policy["loss"] / updates,
            "entropy": policy["entropy"] / tokens,
            "clip_fraction": policy["clipped"] / tokens,
            "grad_norm": policy["grad_norm"] / updates,
            "ratio_mean": policy["ratio"] / tokens,
            "ratio_max": policy["max_ratio"],
        }
        if "skipped" in policy:
            row |= {"skipped": policy["skipped"] / updates, "drift": policy["drift"] / max(policy["drift_units"], 1e-9)}
        if policy.get("external_tokens"):
            row["external_probability"] = policy["external_probability"] / policy["external_tokens"]
    if policy and policy.get("observation_tokens"):
        row["observation_loss"] = policy["observation_loss"] / policy["observation_tokens"]
    if policy and "cloning_loss" in policy:
        row["imitation_loss"] = policy["cloning_loss"] / policy["updates"]
    turn_critic = sums.get("turn_critic")
    if turn_critic:
        turns = max(turn_critic["turns"], 1.0)
        row |= {
            "utterance_loss": turn_critic["loss"] / turn_critic["updates"],
            "utterance_grad_norm": turn_critic["grad_norm"] / turn_critic["updates"],
            "td_error": turn_critic["td_error"] / turns,
            "utterance_clamped": turn_critic["outside"] / turns,
        }
        if "spread_0" in turn_critic:
            row["utterance_spread"] = (turn_critic["spread_0"] + turn_critic["spread_1"]) / 2 / turns
    critic = sums.get("critic")
    if critic:
        row |= {"critic_loss": critic["loss"] / critic["updates"], "critic_grad_norm": critic["grad_norm"] / critic["updates"]}
        tokens = max(critic["tokens"], 1.0)
        variance = critic["squares"] / tokens - (critic["returns"] / tokens) ** 2
        row["critic_mse"] = critic["error"] / tokens
        row["critic_explained_variance"] = 1.0 - row["critic_mse"] / variance if variance > 1e-12 else 0.0
        row["critic_clamped"] = critic["outside"] / tokens
        if "spread" in critic:
            row["critic_spread"] = critic["spread"] / tokens
    return row
