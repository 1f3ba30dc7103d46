"""Policy losses per token (pure functions of the current log-probabilities [b, T]), KL estimators, and aggregation.

Denominators are computed over the entire minibatch before it is split into micro-batches, so the split changes neither loss nor
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.batch import Extra, TurnWords, turn_sums, turn_tokens
from stages.algorithms.parts.part import AppliesAboveZero, AppliesIf, AppliesTo, Part
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


CLIPPED = ("ppo_clip", "turn_clip", "gspo", "cispo")
"""Kinds that bound the ratio."""
COMPARED = AppliesIf(
    lambda rl: rl.loss.kind not in ("policy_gradient", "own"), "loss.kind: importance, ppo_clip, turn_clip, gspo or cispo"
)


class Loss(Part):
    """The policy loss."""

    kind: Literal["policy_gradient", "importance", "ppo_clip", "turn_clip", "gspo", "cispo", "own"] = "policy_gradient"
    """policy_gradient: REINFORCE; importance: with unclipped importance ratios; ppo_clip: PPO; turn_clip: PPO with one ratio per
    turn; gspo: PPO with one ratio per episode; cispo: clipped ratios as weights of REINFORCE."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0), AppliesTo("kind", *CLIPPED)] = 0.2
    """Importance ratios are clipped from below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0.0, le=10.0), AppliesTo("kind", *CLIPPED)] = 0.2
    """Importance ratios are clipped from above at 1 + clip_high."""
    dual_clip: Annotated[Annotated[float, Field(gt=1.0)] | None, AppliesTo("kind", "ppo_clip")] = None
    """ppo_clip: the loss of a token with A < 0 is at most dual_clip * |A|."""
    ratio_norm: Annotated[Literal["sum", "token", "word"], AppliesTo("kind", "turn_clip")] = "sum"
    """turn_clip: what the logarithm of a turn's ratio is: the sum of its tokens', or that divided by their number (token) or by
    the number of words of the action (word)."""
    kl_stop: Annotated[Positive | None, COMPARED] = None
    """An optimiser step is skipped if the mean of rho - 1 - log rho, an estimate of the KL divergence from the policy before the
    step's first update, exceeds this over its minibatch; null: none is."""
    aggregation: Literal["token_mean", "turn_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"
    """How per-token losses are averaged; turn_mean: over each turn's tokens, then over turns."""
    constant_length: Annotated[Count | None, AppliesTo("aggregation", "constant")] = None
    """constant: token sums are divided by this times the number of episodes. null: model.max_length."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the frozen reference."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], AppliesAboveZero("kl_coef")] = "k3"
    """Estimator of the KL divergence per token."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    entropy_aggregation: Annotated[Literal["loss", "token_mean"], AppliesAboveZero("entropy_coef")] = "loss"
    """How the entropy bonus is aggregated: like the loss, or always as a mean over tokens."""

    evidence: Literal["exclude", "include"] = "exclude"
    """Results that the policy wrote for its own searches (SSRL): not trained on, or trained on like its other tokens. Who wrote a
    token is recorded; what a text looks like changes nothing."""

    @property
    def trains_evidence(self) -> bool:
        """What `trajectory_batch` takes as `evidence`."""
        return self.evidence == "include"

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        loss = values["loss"]
        if loss["aggregation"] == "constant" and loss["constant_length"] is None:
            loss["constant_length"] = max_length

    def check(self, rl: Rl, method: Composition) -> None:
        if self.kind == "policy_gradient" and (rl.epochs > 1 or rl.minibatches > 1):
            raise ParamsError(
                f"rl.loss.kind: policy_gradient does not correct for off-policy data, and rl.epochs is {rl.epochs}, "
                f"rl.minibatches {rl.minibatches}; set both to 1, or loss.kind to importance, ppo_clip, gspo or cispo"
            )
        if self.kind == "turn_clip" and rl.advantage.level == "token":
            raise ParamsError(
                "rl.loss.kind: turn_clip has one ratio for all tokens of a turn, and rl.advantage.level: token credits each "
                "alone: set level to turn or trajectory, or kind to ppo_clip"
            )


@dataclass(frozen=True)
class MeanLogprobs(Extra):
    """For methods whose loss compares with it (`Composition.rescored`)."""

    PER_TOKEN = ("old",)

    old: Tensor
    """[B, T] float32: mean over the vocabulary of the log-probabilities before each token, before the step's first update; 0 off
    the mask."""


@dataclass(frozen=True)
class WithoutKl(Extra):
    """Rows of a batch that have no KL term (`kl_coef`)."""

    free: Tensor
    """[B] bool."""


def advantages_of(batch: TrajectoryBatch) -> Tensor:
    """The batch's advantages [b, T]. Raises ValueError if there are none yet."""
    if batch.advantages is None:
        raise ValueError("the batch has no advantages; run the advantage part before the loss")
    return batch.advantages


def clip_range(params: Loss) -> tuple[float, float]:
    """(1 - clip_low, 1 + clip_high)."""
    return 1 - params.clip_low, 1 + params.clip_high


def log_ratio(logprobs: Tensor, batch: TrajectoryBatch) -> Tensor:
    """log pi(y_t) - log pi_old(y_t), [b, T], 0 off the mask."""
    import torch

    return torch.where(batch.mask, logprobs - batch.logprobs_old, torch.zeros_like(logprobs))


def sequence_log_ratio(logprobs: Tensor, batch: TrajectoryBatch) -> Tensor:
    """Mean of `log_ratio` over each episode's mask, repeated on its tokens: [b, T], 0 off the mask (GSPO's log s_i)."""
    import torch

    means = log_ratio(logprobs, batch).sum(1) / batch.mask.sum(1).clamp(min=1)
    return torch.where(batch.mask, means[:, None], torch.zeros_like(logprobs))


def turn_log_ratio(logprobs: Tensor, batch: TrajectoryBatch, norm: str) -> Tensor:
    """Sum of `log_ratio` over the mask of each turn, divided by 1 (sum), its tokens (token) or its words (word), repeated on the
    turn's tokens: [b, T], 0 off the mask (MARFT, arXiv 2504.16129). Raises ValueError for `word` without TurnWords."""
    import torch

    count = batch.turn_rewards.shape[1]
    sums = turn_sums(log_ratio(logprobs, batch), batch.turn, count)
    if norm == "token":
        sums = sums / turn_tokens(batch).clamp(min=1)
    elif norm == "word":
        if (words := batch.get(TurnWords)) is None:
            raise ValueError("rl.loss.ratio_norm: word needs the turns' numbers of words, and this batch has none")
        sums = sums / words.count.to(sums.dtype).clamp(min=1)
    return torch.where(batch.mask, sums.gather(1, batch.turn.clamp(min=0)), torch.zeros_like(logprobs))


def unit_log_ratio(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """The log-ratio [b, T] that the loss of `params` has on each token: of the token, its turn or its episode."""
    if params.kind == "gspo":
        return sequence_log_ratio(logprobs, batch)
    return turn_log_ratio(logprobs, batch, params.ratio_norm) if params.kind == "turn_clip" else log_ratio(logprobs, batch)


def policy_gradient(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """REINFORCE: -A_t log pi(y_t), [b, T], 0 off the mask (Williams 1992). No correction for off-policy data."""
    import torch

    return torch.where(batch.mask, -advantages_of(batch) * logprobs, torch.zeros_like(logprobs))


def importance(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """-rho_t A_t with rho_t = exp(log pi - log pi_old), [b, T], 0 off the mask: `ppo_clip` without the clip."""
    import torch

    return torch.where(batch.mask, -log_ratio(logprobs, batch).exp() * advantages_of(batch), torch.zeros_like(logprobs))


def _clipped_surrogate(logs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """-min(rho A, clip(rho) A) with rho = exp(logs) [b, T]; at most dual_clip |A| where A < 0."""
    import torch

    low, high = clip_range(params)
    ratio, advantages = logs.exp(), advantages_of(batch)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if params.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -params.dual_clip * advantages), loss)
    return torch.where(batch.mask, loss, torch.zeros_like(loss))


def ppo_clip(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """-min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t), [b, T], 0 off the mask (Schulman et al., arXiv 1707.06347).

    rho_t = exp(log pi - log pi_old). At rho = 1 the gradient is that of `policy_gradient`. dual_clip: arXiv 1912.09729.
    """
    return _clipped_surrogate(log_ratio(logprobs, batch), batch, params)


def turn_clip(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """`ppo_clip` with one ratio per turn (`turn_log_ratio`): [b, T]. All tokens of a turn have the same loss if they have the
    same advantage, so turn_mean gives the mean over turns; a turn of one token is `ppo_clip`."""
    return _clipped_surrogate(turn_log_ratio(logprobs, batch, params.ratio_norm), batch, params)


def gspo(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """`ppo_clip` with one ratio per episode, exp(mean_t (log pi - log pi_old)) (Zheng et al., arXiv 2507.18071): [b, T]. All
    tokens of an episode have the same loss, so seq_mean_token_mean gives the mean over episodes."""
    return _clipped_surrogate(sequence_log_ratio(logprobs, batch), batch, params)


def cispo(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """-sg[clip(rho_t, 1 - clip_low, 1 + clip_high)] A_t log pi(y_t), [b, T] (MiniMax-M1, arXiv 2506.13585): clips the weight, not
    the token's gradient."""
    import torch

    low, high = clip_range(params)
    weight = log_ratio(logprobs.detach(), batch).exp().clamp(low, high)
    return torch.where(batch.mask, -weight * advantages_of(batch) * logprobs, torch.zeros_like(logprobs))


LOSSES = {
    "policy_gradient": policy_gradient,
    "importance": importance,
    "ppo_clip": ppo_clip,
    "turn_clip": turn_clip,
    "gspo": gspo,
    "cispo": cispo,
}


def clipped(logprobs: Tensor, batch: TrajectoryBatch, params: Loss) -> Tensor:
    """Tokens [b, T] bool that clipping affects: no gradient under ppo_clip, turn_clip and gspo, a clipped weight under cispo."""
    import torch

    if params.kind not in CLIPPED:
        return torch.zeros_like(batch.mask)
    low, high = clip_range(params)
    ratio = unit_log_ratio(logprobs, batch, params).exp()
    advantages = advantages_of(batch)
    above, below = ratio > high, ratio < low
    if params.kind == "cispo":
        return (above | below) & batch.mask
    affected = (above & (advantages > 0)) | (below & (advantages < 0))
    if params.dual_clip is not None:
        affected |= (ratio > params.dual_clip) & (advantages < 0)
    return affected & batch.mask


def kl_estimate(logprobs: Tensor, logprobs_ref: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) on the policy's own samples (Schulman, "Approximating KL divergence").

    With d = log pi - log pi_ref: k1 = d (unbiased; as a loss its expected gradient is zero, so it only adds noise), k2 = d^2 / 2
    (its gradient is the gradient of the KL), k3 = exp(-d) - 1 + d (unbiased, never negative; biased gradient);
    k1_positive = max(0, d), for rewards only, is biased upwards.
    """
    import torch

    d = logprobs - logprobs_ref
    if kind == "k1":
        return d
    if kind == "k1_positive":
        return d.clamp(min=0.0)
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return torch.exp(-d) - 1 + d
    raise ValueError(f"unknown rl.loss.kl_estimator '{kind}'; known: k1, k1_positive, k2, k3")


@dataclass(frozen=True)
class Denominators:
    """Divisors of `aggregate`, over an entire minibatch; see `denominators`."""

    tokens: float
    sequences: float
    constant: float | None = None
    turns: float = 1.0


def denominators(batch: TrajectoryBatch, constant_length: float | None) -> Denominators:
    """Policy tokens, and episodes and turns with at least one of them, weighted by row, never below 1; `constant` is episodes *
    constant_length (Dr. GRPO's divisor, as in TRL), None for a loss without that."""
    weights = batch.weights.double()
    tokens = float((batch.mask.sum(1) * weights).sum())
    sequences = max(float((batch.mask.any(1) * weights).sum()), 1.0)
    turns = max(float(((turn_tokens(batch) > 0).sum(1) * weights).sum()), 1.0)
    return Denominators(max(tokens, 1.0), sequences, None if constant_length is None else sequences * constant_length, turns)


def aggregate(
    loss: Tensor, mask: Tensor, kind: str, total: Denominators, weight: Tensor | None = None, means: Tensor | None = None
) -> Tensor:
    """A micro-batch's share (a scalar) of per-token losses [b, T] over mask [b, T], rows weighted by `weight` [b]; the shares of
    all micro-batches sum to:

    token_mean: sum over tokens / tokens. turn_mean: mean over turns of their token means (`means`: `turn_means`).
    seq_mean_token_mean: mean over episodes of their token means.
    seq_mean_token_sum: mean over episodes of their token sums. constant: sum over tokens / (episodes * a constant length).
    """
    import torch

    masked = torch.where(mask, loss, torch.zeros_like(loss))
    if weight is not None:
        masked = masked * weight[:, None]
    if kind == "token_mean":
        return masked.sum() / total.tokens
    if kind == "turn_mean":
        assert means is not None
        return (masked * means).sum() / total.turns
    if kind == "seq_mean_token_mean":
        return (masked.sum(1) / mask.sum(1).clamp(min=1)).sum() / total.sequences
    if kind == "seq_mean_token_sum":
        return masked.sum() / total.sequences
    if kind == "constant":
        assert total.constant is not None
        return masked.sum() / total.constant
    raise ValueError(
        f"unknown rl.loss.aggregation '{kind}'; known: token_mean, turn_mean, seq_mean_token_mean, seq_mean_token_sum, constant"
    )
