"""External tokens: what the loss of a demonstration's tokens is while the policy learns from its own episodes beside it.

With p and p_old the policy's probability of a token now and before the step, and A the advantage of the token's episode in its
group, the loss is -A C r, where C = (1 - sg[p])^gamma is the exploration-based weight (high where the policy does not expect the
token) and r one of

    mis   2 p / (p_w + p_old), p_w = mix p_old + (1 - mix) U   multiple importance sampling (Dong et al., arXiv 2508.00222): the
                                                               unknown behaviour policy is a mixture with a uniform one
    pi    p                                                    the behaviour's probability taken as 1
    old   p / p_old                                            the demonstration taken for the policy's own

or it is -coef log p (sft), which follows demonstrations whatever they bring. The paper's U is one over the vocabulary, its code's
the number 1: for U = 1/V and p_old >> U, r is about 4/3 at any p = p_old, for U = 1 it is about 4 p for small p. Two methods.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.contract import TrajectoryBatch
from stages.algorithms.losses import advantages_of
from stages.parameters.rl import External


def uniform(params: External, vocabulary: int | None) -> float:
    """U. Raises ValueError if it is one over a vocabulary of unknown size."""
    if params.u != "vocabulary":
        return 1.0 if params.u is None else params.u
    if vocabulary is None:
        raise ValueError("rl.external.u: vocabulary needs the size of the policy's vocabulary, and the batch does not tell it")
    return 1.0 / vocabulary


def ratio(logprobs: Tensor, old: Tensor, params: External, vocabulary: int | None = None) -> Tensor:
    """r of current and old log-probabilities, their shape; cut at `ratio_max`. Bounded by 2 / ((1 - mix) U) for mis."""
    if params.loss == "pi":
        found = logprobs.exp()
    elif params.loss == "old":
        found = (logprobs - old).exp()
    else:
        mix, before = 0.5 if params.mix is None else params.mix, old.exp()
        found = 2 * logprobs.exp() / ((1 + mix) * before + (1 - mix) * uniform(params, vocabulary))
    return found if params.ratio_max is None else found.clamp(max=params.ratio_max)


def exploration(logprobs: Tensor, gamma: float) -> Tensor:
    """C = (1 - p)^gamma, without gradient; 1 for gamma 0."""
    if gamma == 0:
        return torch.ones_like(logprobs)
    return (1 - logprobs.detach().exp()).clamp(min=0.0) ** gamma


def external_loss(logprobs: Tensor, batch: TrajectoryBatch, params: External) -> Tensor:
    """Per-token loss [b, T] on external tokens, 0 elsewhere. Raises ValueError if the batch has no advantages."""
    assert batch.external is not None
    if params.loss == "sft":
        losses = -(1.0 if params.coef is None else params.coef) * logprobs
    else:
        weight = advantages_of(batch) * exploration(logprobs, params.gamma or 0.0)
        losses = -weight * ratio(logprobs, batch.logprobs_old, params, batch.vocabulary)
    return torch.where(batch.external, losses, torch.zeros_like(losses))
