"""B-Coder: token values initialised as the language model's logits, learned off-policy with a conservative Bellman operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from stages.algorithms.batch import LossTerms, next_token_values
from stages.algorithms.card import Card, Composition, OfflineLosses
from stages.algorithms.parts.offline import Discount, OfflineBatch, OfflineSettings, Scores, ValueFit, required, weighted_sum
from stages.algorithms.settings import Rl
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive
from stages.values.token_q import advantages, bounded

CARD = Card(
    slug="b_coder",
    title="B-Coder",
    paper="Yu et al., arXiv 2310.03173",
    equation="Q = A + V, A = alpha (log pi(a) - max log pi), V = r_max - softabs(v + residual); target r + gamma sg Q(s', a^), "
    "a^ the SFT policy's most likely token (operator optimality: max Q(s', .)); first only v is fitted, with the SFT policy's "
    "A, then policy and residual: (Q - target)^2, a mean over an episode's tokens, + beta_adv |A| and - beta_ce log pi of the "
    "ground truth, means too or (ground_truth_terms: sum, the paper's) sums",
    assumptions="offline dataset: demonstrations and known solutions (ground truth), the SFT policy's rollouts, known mistakes; "
    "no episodes are played. gamma, which the paper does not give, is 1; heads are linear, so that the residual, a head minus "
    "its frozen copy, is a head initialised to 0; the value network is a copy of the SFT policy's backbone, the paper freezes an "
    "encoder; truncation is an end; best_of.n up to 64 candidates (paper: 256)",
    reduces_to="settings beta_adv 0, beta_ce 0, operator optimality: dueling DQN; q_coef 0, beta_adv 0: supervised fine-tuning "
    "on the ground truth; a^ the policy's own most likely token: the optimality operator",
    tested_by="tests/algorithms/test_b_coder.py, tests/values/test_token_q.py, tests/training/test_offline.py",
    switch="rl.algorithm: b_coder",
)


class Settings(OfflineSettings):
    alpha: Positive = 1.0
    """Temperature: the policy is softmax(Q / alpha)."""
    gamma: Discount = 1.0
    """Discount per token."""
    operator: Literal["conservative", "optimality"] = "conservative"
    """Next token in the target: the frozen SFT policy's most likely one, or the one with the largest Q."""
    value_steps: Count | None = None
    """Number of rl.steps in which only the value network is trained; null: 9 of 14, as in the paper."""
    value_learning_rate: Positive = 5e-4
    q_coef: NonNegative = 1.0
    """Weight of the squared temporal-difference error."""
    beta_adv: NonNegative = 0.1
    """Weight of |A| on the ground truth."""
    ground_truth_terms: Literal["mean", "sum"] = "mean"
    """Terms of the ground truth, |A| and log pi: means over an episode's tokens, as the temporal-difference error is, or sums, as
    in the paper, which weigh as many times more as the episode has tokens."""
    r_max: Positive = 1.0
    """Upper bound of V, and so of Q: the largest return."""
    init_from_lm: bool = True
    """False: the policy is initialised randomly after the value network's steps (the paper's ablation)."""


def derive(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """`value_steps`, unless it is set: at least one step for each network."""
    usual = max(1, min(values["steps"] - 1, round(values["steps"] * 9 / 14)))
    return settings.model_copy(update={"value_steps": usual if settings.value_steps is None else settings.value_steps})


def targets(rewards: Tensor, following: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """r + gamma Q(s', .) [d, T], without gradient, from `following` = Q(s, .) in each token's own state [d, T]; just r at the
    last token of an episode."""
    return (rewards + gamma * next_token_values(following, mask)).detach()


def temporal_difference(taken: Tensor, following: Tensor, batch: OfflineBatch, gamma: float) -> Tensor:
    """(Q(s, a) - target)^2, [d, T]."""
    return (taken - targets(batch.rewards, following, batch.mask, gamma)) ** 2


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of rewards from each token on [d, T]."""
    following, returns = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards)
    for place in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, place], rewards[:, place] + gamma * following, following)
        returns[:, place] = following
    return returns


def value_loss(scores: Scores, batch: OfflineBatch, rl: Rl) -> LossTerms:
    """Loss of the value network, with the SFT policy's advantages, which are 0 for its own most likely token."""
    settings: Settings = rl.settings
    value = bounded(required(scores.value), settings.r_max)
    taken = advantages(batch.logprobs_ref, batch.best_ref, settings.alpha) + value
    loss = weighted_sum(temporal_difference(taken, value, batch, settings.gamma), batch.mask, batch.weight)
    pair = ValueFit(value.detach(), returns_to_go(batch.rewards, batch.mask, settings.gamma))
    sums = {name: weighted_sum(per_token, batch.mask, batch.weight) for name, per_token in pair.moments().items()}
    return LossTerms(loss, {"td": loss.detach(), **sums})


def policy_loss(scores: Scores, batch: OfflineBatch, rl: Rl) -> LossTerms:
    """Loss of the policy and its residual, with the value network fixed."""
    settings: Settings = rl.settings
    logprobs, best = required(scores.logprobs), required(scores.best)
    value = bounded(required(scores.value) + required(scores.residual), settings.r_max)
    advantage, following = advantages(logprobs, best, settings.alpha), value
    if settings.operator == "conservative":
        following = value + advantages(required(scores.greedy), best, settings.alpha)
    td = weighted_sum(temporal_difference(advantage + value, following, batch, settings.gamma), batch.mask, batch.weight)
    truth = batch.real_weight * (batch.mask.sum(1) if settings.ground_truth_terms == "sum" else 1)
    adv, ce = weighted_sum(advantage.abs(), batch.mask, truth), weighted_sum(-logprobs, batch.mask, truth)
    loss = settings.q_coef * td + settings.beta_adv * adv + settings.beta_ce * ce
    sums = {"loss": loss, "td": td, "ground_truth_advantage": adv, "ground_truth_nll": ce}
    sums["value"] = weighted_sum(value, batch.mask, batch.weight)
    return LossTerms(loss, {name: number.detach() for name, number in sums.items()})


def check(given: Rl, resolved: Rl) -> None:
    """Raise ParamsError unless both networks have steps, and the policy a loss."""
    settings: Settings = resolved.settings
    if resolved.steps < 2 or (settings.value_steps or 0) >= resolved.steps:
        raise ParamsError(
            f"rl.settings.value_steps ({settings.value_steps}) leaves none of rl.steps ({resolved.steps}) for the policy; set it "
            f"below that, and rl.steps to at least 2"
        )
    if not settings.q_coef and not settings.beta_adv and not settings.beta_ce:
        raise ParamsError("rl.settings: q_coef, beta_adv and beta_ce are all 0, so there is no loss; set one above 0")
    if not settings.real_share and (settings.beta_adv or settings.beta_ce):
        raise ParamsError(
            "rl.settings.real_share is 0, but beta_adv and beta_ce apply to ground truth; set them to 0, or real_share above 0"
        )


COMPOSITION = Composition(
    card=CARD,
    parts={},
    settings=Settings,
    derive=derive,
    check=check,
    data="offline",
    offline=OfflineLosses(policy_loss, value_loss),
)
