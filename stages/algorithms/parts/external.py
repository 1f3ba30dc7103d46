"""Demonstrations as members of the policy's groups, and the loss of their (external) tokens.

With p and p_old the policy's probability of a token now and before the step, and A the advantage of the token's episode in its
group, the loss is -A C r, where C = (1 - sg[p])^gamma is the exploration weight (high for tokens unlikely under the policy) and r
one of

    mis   2 p / (p_w + p_old), p_w = mix p_old + (1 - mix) U   multiple importance sampling (Dong et al., arXiv 2508.00222): the
                                                               unknown behaviour policy is a mixture with a uniform one
    pi    p                                                    assumes that the behaviour policy's probability is 1
    old   p / p_old                                            assumes that the policy wrote the demonstration itself

or it is -coef log p (sft), whatever the reward. U is 1 / vocabulary in the paper and 1 in its code, which are different methods:
with U = 1/V and p_old >> U, r is about 4/3 at p = p_old; with U = 1 it is about 4 p for small p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.algorithms.batch import Extra
from stages.algorithms.parts.loss import advantages_of
from stages.algorithms.parts.part import AppliesAboveZero, AppliesTo, Part
from stages.runtime.validation import NonNegative, ParamsError, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class External(Part):
    """Demonstrations of the task as members of the policy's groups."""

    data = ("episodes",)

    per_group: Annotated[int, Field(ge=0)] = 0
    """How many episodes of a group are demonstrations instead of the policy's own; fewer if the task has fewer."""
    source: Annotated[Literal["expert", "all"], AppliesAboveZero("per_group")] = "expert"
    """Which demonstrations: the expert's, or also the noisy expert's."""
    loss: Annotated[Literal["mis", "pi", "old", "sft"], AppliesAboveZero("per_group")] = "mis"
    """Loss of external tokens: -A C r with the ratio r = 2 p / (p_w + p_old) (mis), p (pi) or p / p_old (old); sft: -coef log p,
    whatever the reward."""
    mix: Annotated[Share, AppliesAboveZero("per_group"), AppliesTo("loss", "mis")] = 0.5
    """mis: the unknown behaviour policy is p_w = mix * p_old + (1 - mix) * U."""
    u: Annotated[Positive | Literal["vocabulary"], AppliesAboveZero("per_group"), AppliesTo("loss", "mis")] = 1.0
    """mis: U, a number, or `vocabulary` for one over the vocabulary size."""
    ratio_max: Annotated[Positive | None, AppliesAboveZero("per_group"), AppliesTo("loss", "mis", "pi", "old")] = None
    """mis, pi, old: the ratio is clipped at this value, without a gradient beyond it."""
    gamma: Annotated[NonNegative, AppliesAboveZero("per_group"), AppliesTo("loss", "mis", "pi", "old")] = 0.0
    """mis, pi, old: exploration-based advantage, C = (1 - p)^gamma; 0: C = 1."""
    coef: Annotated[NonNegative, AppliesAboveZero("per_group"), AppliesTo("loss", "sft")] = 1.0
    """sft: weight of the negative log-probability."""

    def check(self, rl: Rl, method: Composition) -> None:
        count = self.per_group
        if count and count >= rl.group_size:
            raise ParamsError(
                f"rl.external.per_group is {count} and rl.group_size {rl.group_size}, which leaves no episode for the policy; "
                f"lower per_group, or raise group_size"
            )
        if count and rl.advantage.estimator in ("gae", "team"):
            raise ParamsError(
                f"rl.external.per_group is above 0 with rl.advantage.estimator: {rl.advantage.estimator}, so the critic would be "
                "trained on another policy's returns; set per_group to 0, or estimator to group"
            )


@dataclass(frozen=True)
class PolicyVocabulary(Extra):
    size: int
    """Tokens that the policy chooses among."""


def uniform(params: External, vocabulary: int | None) -> float:
    """U. Raises ValueError if it is one over a vocabulary of unknown size."""
    if params.u != "vocabulary":
        return params.u
    if vocabulary is None:
        raise ValueError("rl.external.u: vocabulary needs the size of the policy's vocabulary, and the batch does not have it")
    return 1.0 / vocabulary


def ratio(logprobs: Tensor, old: Tensor, params: External, vocabulary: int | None = None) -> Tensor:
    """r of current and old log-probabilities, in their shape; clipped at `ratio_max`. Bounded by 2 / ((1 - mix) U) for mis."""
    if params.loss == "pi":
        found = logprobs.exp()
    elif params.loss == "old":
        found = (logprobs - old).exp()
    else:
        mix, before = params.mix, old.exp()
        found = 2 * logprobs.exp() / ((1 + mix) * before + (1 - mix) * uniform(params, vocabulary))
    return found if params.ratio_max is None else found.clamp(max=params.ratio_max)


def exploration(logprobs: Tensor, gamma: float) -> Tensor:
    """C = (1 - p)^gamma, without gradient; 1 for gamma 0."""
    import torch

    if gamma == 0:
        return torch.ones_like(logprobs)
    return (1 - logprobs.detach().exp()).clamp(min=0.0) ** gamma


def external_loss(logprobs: Tensor, batch: TrajectoryBatch, params: External) -> Tensor:
    """Per-token loss [b, T] on external tokens, 0 elsewhere. Raises ValueError if the batch has no advantages."""
    import torch

    assert batch.external is not None
    if params.loss == "sft":
        losses = -params.coef * logprobs
    else:
        weight = advantages_of(batch) * exploration(logprobs, params.gamma)
        vocabulary = batch.get(PolicyVocabulary)
        losses = -weight * ratio(logprobs, batch.logprobs_old, params, vocabulary.size if vocabulary else None)
    return torch.where(batch.external, losses, torch.zeros_like(losses))
