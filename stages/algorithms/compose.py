"""Puts a method together: `rl.algorithm` names a composition, every key the user set overrides its part.

algorithm = resolve(params.section("rl", domain))
batch = algorithm.prepare(batch)                            # advantages and step credit, over the whole batch
total = denominators(minibatch, ...)                        # before micro-batching
terms = algorithm.loss(logprobs, entropy, micro, total)     # a share of the loss
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.algorithms.advantage import advantage
from stages.algorithms.aggregation import aggregate
from stages.algorithms.contract import Card, Denominators, LossTerms, TrajectoryBatch
from stages.algorithms.credit import add_credit
from stages.algorithms.kl import kl_estimate
from stages.algorithms.losses import LOSSES, clipped, log_ratio
from stages.algorithms.registry import composition
from stages.params import Rl
from stages.validation import ParamsError

_DEFAULTS: dict[str, Any] = {
    "advantage.estimator": "group",
    "advantage.mean": "none",
    "advantage.std": "none",
    "advantage.gamma": 1.0,
    "advantage.lam": 1.0,
    "advantage.whiten": False,
    "loss.kind": "policy_gradient",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.2,
    "loss.aggregation": "token_mean",
}


@dataclass(frozen=True)
class Algorithm:
    """A method with every switch decided."""

    card: Card
    rl: Rl
    """The section with no null left."""
    needs_critic: bool

    @property
    def needs_reference(self) -> bool:
        return self.rl.loss.kl_coef > 0

    def prepare(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The batch with `advantages` (and `returns` where there is a critic), step credit included."""
        return add_credit(advantage(batch, self.rl.advantage), self.rl.credit)

    def loss(self, logprobs: Tensor, entropy: Tensor, batch: TrajectoryBatch, total: Denominators) -> LossTerms:
        """One micro-batch's share of the loss.

        logprobs, entropy: [b, T] under the current policy, 0 off the mask; `batch` holds the same rows; `total` is the
        optimiser step's. `sums` adds up over micro-batches, save `max_ratio`, which is a maximum.
        """
        params = self.rl.loss
        per_token = LOSSES[params.kind or "policy_gradient"](logprobs, batch, params)
        if params.kl_coef > 0:
            if batch.logprobs_ref is None:
                raise ValueError("rl.loss.kl_coef is above 0 and the batch has no reference log-probabilities")
            per_token = per_token + params.kl_coef * kl_estimate(logprobs, batch.logprobs_ref, params.kl_estimator)
        if params.entropy_coef > 0:
            per_token = per_token - params.entropy_coef * entropy
        loss = aggregate(per_token, batch.mask, params.aggregation or "token_mean", total)
        return LossTerms(loss, _statistics(logprobs.detach(), entropy.detach(), batch, params, loss.detach()))


def _statistics(logprobs: Tensor, entropy: Tensor, batch: TrajectoryBatch, params: Any, loss: Tensor) -> dict[str, Tensor]:
    mask = batch.mask
    ratio = log_ratio(logprobs, batch).exp()
    sums = {
        "loss": loss,
        "tokens": mask.sum(),
        "entropy": (entropy * mask).sum(),
        "ratio": (ratio * mask).sum(),
        "max_ratio": (ratio * mask).max(),
        "clipped": clipped(logprobs, batch, params).sum() if params.kind == "ppo_clip" else torch.zeros(()),
    }
    if batch.logprobs_ref is not None:
        sums["kl"] = (kl_estimate(logprobs, batch.logprobs_ref, "k3") * mask).sum()
    return sums


def resolve(rl: Rl) -> Algorithm:
    """The algorithm that section `rl` stands for. Raises ParamsError for switches that would have no effect or no meaning."""
    method = composition(rl.algorithm)
    values = rl.model_dump()
    for key, default in _DEFAULTS.items():
        section, name = key.split(".")
        if values[section][name] is None:
            values[section][name] = method.parts.get(key, default)
    resolved = Rl.model_validate(values)
    _check(rl, resolved)
    return Algorithm(method.card, resolved, needs_critic=resolved.advantage.estimator == "gae")


def _check(given: Rl, resolved: Rl) -> None:
    """Refuse what would silently be ignored."""
    advantage_, loss = resolved.advantage, resolved.loss
    if resolved.group_size < 2 and (advantage_.mean in ("group", "leave_one_out") or advantage_.std == "group"):
        raise ParamsError(
            f"rl.group_size is 1 and rl.advantage (mean {advantage_.mean}, std {advantage_.std}) compares episodes of a group; "
            f"set group_size to at least 2 or mean and std to batch"
        )
    if advantage_.estimator == "gae" and (advantage_.mean != "none" or advantage_.std != "none"):
        raise ParamsError(
            f"rl.advantage.mean {advantage_.mean} and std {advantage_.std} belong to estimator group; with gae the critic is the "
            f"baseline: set both to none, or estimator to group"
        )
    if advantage_.estimator == "group" and (advantage_.gamma != 1.0 or advantage_.lam != 1.0):
        raise ParamsError("rl.advantage.gamma and lam belong to estimator gae; set them to null, or estimator to gae")
    sampling = resolved.sampling
    if sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0:
        raise ParamsError(
            f"rl.sampling (temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}) must draw "
            f"from the whole distribution that is trained: temperature above 0, top_p 1, top_k 0"
        )
    if loss.kind == "policy_gradient" and (given.loss.clip_low is not None or given.loss.clip_high is not None):
        raise ParamsError("rl.loss.clip_low and clip_high belong to kind ppo_clip; set them to null, or kind to ppo_clip")
