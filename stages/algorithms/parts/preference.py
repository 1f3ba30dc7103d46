"""Losses on preference pairs: pure functions of log-probabilities of a winner and a loser after a common history.

Symbols: l the sum of log pi over a continuation's policy tokens, lbar the mean; h = l - l_ref; D = h(winner) - h(loser);
s = log sigmoid. `beta`, `gamma` and the others are keys of rl.preference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.parts.part import AppliesTo, Part
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Preference(Part):
    """Offline optimisation on preference pairs, for algorithms that learn from them."""

    switch, data = "loss", ("pairs",)

    source: Literal["trees", "imported", "all", "guided"] = "trees"
    """Pairs of data/annotated/<domain>, those that curate imported (curate.imports), or both; guided: successes, plain or with a
    hint (rl.guidance), against plain failures of the rollout stage."""
    loss: Literal["dpo", "cdpo", "robust_dpo", "slic", "ipo", "kto", "orpo", "simpo", "cpo", "sppo", "own"] = "dpo"
    """The loss of a pair."""
    level: Literal["step", "trajectory"] = "trajectory"
    """What a pair from a tree compares: the two actions, or each with its continuation to the nearest successful or failed
    end."""
    pairs_per_step: Count = 32
    """Pairs in one optimiser step."""
    beta: Positive = 0.1
    """Factor on the log-ratio of policy and reference."""
    gamma: Annotated[NonNegative, AppliesTo("loss", "simpo")] = 0.5
    """simpo: target margin, not multiplied by beta."""
    smoothing: Annotated[float, Field(ge=0.0, lt=0.5), AppliesTo("loss", "cdpo", "robust_dpo")] = 0.1
    """cdpo, robust_dpo: assumed share of pairs with the labels swapped."""
    length_normalise: Annotated[bool, AppliesTo("loss", "ipo")] = False
    """ipo: mean log-probabilities per token instead of sums."""
    desirable: Annotated[Positive, AppliesTo("loss", "kto")] = 1.0
    """kto: weight of desirable examples."""
    undesirable: Annotated[Positive, AppliesTo("loss", "kto")] = 1.0
    """kto: weight of undesirable examples."""
    reward_model: bool = False
    """Also fit a reward model of whole episodes to the pairs, -log sigmoid(s(winner) - s(loser)), for `rl@<domain>+reward` in
    evaluate.models, which plays the best of evaluate.best_of.n episodes."""
    reward_learning_rate: Annotated[Positive, AppliesTo("reward_model", True)] = 1e-4
    """AdamW's, for the reward model."""
    nll_coef: Annotated[NonNegative, AppliesTo("loss", "cpo", "orpo")] = 1.0
    """cpo, orpo: weight of the winner's negative log-probability."""

    def check(self, rl: Rl, method: Composition) -> None:
        if self.loss == "kto" and self.pairs_per_step == 1:
            raise ParamsError(
                "rl.preference.pairs_per_step is 1, but kto compares with continuations of other pairs; set it to at least 2"
            )
        if self.source == "guided" and self.level == "step":
            raise ParamsError("rl.preference.level is step, and guided attempts are whole episodes: set it to trajectory")
        if self.reward_model and self.level == "step":
            raise ParamsError(
                "rl.preference.reward_model scores whole episodes, and level step compares single actions: set level to "
                "trajectory"
            )

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        leaves = section("annotate").evaluation
        if method.data != "pairs":
            return
        if self.reward_model and section("model").lora.rank:
            yield "rl.preference.reward_model trains all weights of a second model: set model.lora.rank to 0, or it to false"
        full_episodes = self.level == "trajectory" and self.source in ("trees", "all")
        if full_episodes and not leaves.keep_rollouts and leaves.kind != "value_model":
            yield (
                "rl.preference.level: trajectory learns from full episodes, which annotate.evaluation.keep_rollouts: false does "
                "not keep: set keep_rollouts to true, or level to step"
            )
        if self.source in ("imported", "all") and not section("curate").imports:
            yield f"rl.preference.source: {self.source} needs imported pairs, and curate.imports is empty: list a file there"


@dataclass(frozen=True)
class PairScores:
    """Scores of P pairs; all tensors are [P] float32."""

    win: Tensor
    lose: Tensor
    """l under the policy, with gradient."""
    ref_win: Tensor
    ref_lose: Tensor
    """l under the frozen reference; 0 for a method without one."""
    win_tokens: Tensor
    lose_tokens: Tensor
    """Policy tokens of the continuations."""
    win_value: Tensor
    lose_value: Tensor
    """Values of the continuations in [0, 1]: whether they succeed; at level step, how often the policy succeeds after them."""
    mismatched: float = 0.0
    """kto: z0, the mean h of continuations after other pairs' histories, at least 0."""

    @property
    def difference(self) -> Tensor:
        """D, [P]."""
        return (self.win - self.ref_win) - (self.lose - self.ref_lose)

    @property
    def implicit(self) -> tuple[Tensor, Tensor]:
        """h of the winners and of the losers, [P] each."""
        return self.win - self.ref_win, self.lose - self.ref_lose

    @property
    def win_mean(self) -> Tensor:
        """lbar of the winners, [P]."""
        return self.win / self.win_tokens.clamp(min=1)

    @property
    def lose_mean(self) -> Tensor:
        """lbar of the losers, [P]."""
        return self.lose / self.lose_tokens.clamp(min=1)


def dpo(pairs: PairScores, params: Preference) -> Tensor:
    """-s(beta D), [P] (Rafailov et al., arXiv 2305.18290, equation 7)."""
    from torch.nn.functional import logsigmoid

    return -logsigmoid(params.beta * pairs.difference)


def cdpo(pairs: PairScores, params: Preference) -> Tensor:
    """-(1 - e) s(beta D) - e s(-beta D), [P]: conservative DPO for a share e of swapped labels (Mitchell, 2023)."""
    from torch.nn.functional import logsigmoid

    logit, swapped = params.beta * pairs.difference, params.smoothing
    return -(1 - swapped) * logsigmoid(logit) - swapped * logsigmoid(-logit)


def robust_dpo(pairs: PairScores, params: Preference) -> Tensor:
    """[-(1 - e) s(beta D) + e s(-beta D)] / (1 - 2 e), [P] (Chowdhury et al., arXiv 2403.00409)."""
    from torch.nn.functional import logsigmoid

    logit, swapped = params.beta * pairs.difference, params.smoothing
    return (-(1 - swapped) * logsigmoid(logit) + swapped * logsigmoid(-logit)) / (1 - 2 * swapped)


def slic(pairs: PairScores, params: Preference) -> Tensor:
    """max(0, 1 - beta D), [P]: the hinge of SLiC-HF (Zhao et al., arXiv 2305.10425)."""
    return (1 - params.beta * pairs.difference).clamp(min=0)


def ipo(pairs: PairScores, params: Preference) -> Tensor:
    """(D - 1 / (2 beta))^2, [P] (Azar et al., arXiv 2310.12036, equation 17); D of means per token with `length_normalise`."""
    difference = pairs.difference
    if params.length_normalise:
        win = (pairs.win - pairs.ref_win) / pairs.win_tokens.clamp(min=1)
        difference = win - (pairs.lose - pairs.ref_lose) / pairs.lose_tokens.clamp(min=1)
    return (difference - 1 / (2 * params.beta)) ** 2


def kto_examples(h: Tensor, desirable: Tensor, z0: float, params: Preference) -> Tensor:
    """Loss of single examples [N] with h [N] and labels [N] bool (Ethayarajh et al., arXiv 2402.01306, equation 8):
    desirable * (1 - sigmoid(beta (h - z0))) or undesirable * (1 - sigmoid(beta (z0 - h)))."""
    import torch

    beta = params.beta
    good = params.desirable * (1 - torch.sigmoid(beta * (h - z0)))
    bad = params.undesirable * (1 - torch.sigmoid(beta * (z0 - h)))
    return torch.where(desirable, good, bad)


def kto(pairs: PairScores, params: Preference) -> Tensor:
    """Mean of `kto_examples` over a pair's two members, [P]."""
    import torch

    label = torch.ones_like(pairs.win, dtype=torch.bool)
    winners = kto_examples(pairs.win - pairs.ref_win, label, pairs.mismatched, params)
    return (winners + kto_examples(pairs.lose - pairs.ref_lose, ~label, pairs.mismatched, params)) / 2


def log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 - p)) with p = exp(mean), the mean log-probability per token: [P]. Kept finite at p = 1."""
    import torch

    mean = mean.clamp(max=-1e-6)
    return mean - torch.log(-torch.expm1(mean))


def orpo(pairs: PairScores, params: Preference) -> Tensor:
    """-nll_coef lbar(winner) - beta s(log odds(winner) - log odds(loser)), [P] (Hong et al., arXiv 2403.07691, equation 6)."""
    from torch.nn.functional import logsigmoid

    odds = log_odds(pairs.win_mean) - log_odds(pairs.lose_mean)
    return -params.nll_coef * pairs.win_mean - params.beta * logsigmoid(odds)


def simpo(pairs: PairScores, params: Preference) -> Tensor:
    """-s(beta (lbar(winner) - lbar(loser)) - gamma), [P] (Meng et al., arXiv 2405.14734, equation 6)."""
    from torch.nn.functional import logsigmoid

    margin = params.beta * (pairs.win_mean - pairs.lose_mean)
    return -logsigmoid(margin - params.gamma)


def cpo(pairs: PairScores, params: Preference) -> Tensor:
    """-s(beta (l(winner) - l(loser))) - nll_coef lbar(winner), [P] (Xu et al., arXiv 2401.08417)."""
    from torch.nn.functional import logsigmoid

    ranking = -logsigmoid(params.beta * (pairs.win - pairs.lose))
    return ranking - params.nll_coef * pairs.win_mean


def sppo(pairs: PairScores, params: Preference) -> Tensor:
    """(h(winner) - 1/(2 beta))^2 + (h(loser) + 1/(2 beta))^2, [P]: SPPO with hard labels (Wu et al., arXiv 2405.00675)."""
    half = 1 / (2 * params.beta)
    return (pairs.win - pairs.ref_win - half) ** 2 + (pairs.lose - pairs.ref_lose + half) ** 2


LOSSES: dict[str, Callable[[PairScores, Preference], Tensor]] = {
    **{"dpo": dpo, "cdpo": cdpo, "robust_dpo": robust_dpo, "slic": slic, "ipo": ipo, "kto": kto, "orpo": orpo, "simpo": simpo},
    **{"cpo": cpo, "sppo": sppo},
}


def margin(pairs: PairScores, loss: str) -> Tensor:
    """The margin of each pair, [P] nats, positive if it is ranked correctly: the difference of mean log-probabilities for losses
    on means without a reference (orpo, simpo), of sums for cpo, D for the others."""
    if loss in ("orpo", "simpo"):
        return pairs.win_mean - pairs.lose_mean
    return pairs.win - pairs.lose if loss == "cpo" else pairs.difference


REFERENCE_FREE = ("orpo", "simpo", "cpo")
"""Losses that need no frozen reference."""
