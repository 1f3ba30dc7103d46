"""B-Coder: token values that begin as the language model's logits, learnt off-policy under a conservative Bellman operator."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from stages.algorithms.batch import LossTerms, next_token_values
from stages.algorithms.card import Card, Composition, OfflineLosses
from stages.algorithms.parts.offline import Discount, OfflineBatch, OfflineSettings, Scores, imitation, required, weighted_sum
from stages.algorithms.settings import Rl
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive
from stages.values.token_q import advantages, bounded

CARD = Card(
    slug="b_coder",
    title="B-Coder",
    paper="Yu et al., arXiv 2310.03173",
    equation="Q = A + V, A = alpha (log pi(a) - max log pi), V = r_max - softabs(v + residual); target r + gamma sg Q(s', a^), "
    "a^ the SFT policy's likeliest token (operator optimality: max Q(s', .)); first v alone is fitted, with the SFT policy's A, "
    "then policy and residual: (Q - target)^2 + beta_adv |A| and - beta_ce log pi of the ground truth, means over an episode's "
    "tokens",
    assumptions="offline dataset: demonstrations and known solutions (ground truth), the SFT policy's rollouts, known mistakes; "
    "nothing is played. gamma, which the paper leaves open, 1; linear heads, so that the residual, a head less its frozen copy, "
    "is a head that starts at 0; the value network is a copy of the SFT policy's backbone, where the paper freezes an encoder; "
    "an episode that was cut ends there; best_of.n up to 64 candidates (paper: 256)",
    reduces_to="settings beta_adv 0, beta_ce 0, operator optimality: dueling DQN; q_coef 0, beta_adv 0: supervised fine-tuning "
    "on the ground truth; the policy's own likeliest token for a^: the optimality operator",
    tested_by="tests/algorithms/test_b_coder.py, tests/values/test_token_q.py, tests/training/test_offline.py",
    switch="rl.algorithm: b_coder",
)


class Settings(OfflineSettings):
    alpha: Positive = 1.0
    """Energy temperature: the policy is softmax(Q / alpha)."""
    gamma: Discount = 1.0
    """Per token."""
    operator: Literal["conservative", "optimality"] = "conservative"
    """Whose next token counts: the frozen SFT policy's likeliest, or the one of largest Q."""
    value_steps: Count | None = None
    """Of rl.steps, those in which the value network alone learns; null: 9 of 14, as in the paper."""
    value_learning_rate: Positive = 5e-4
    q_coef: NonNegative = 1.0
    """Weight of the temporal difference."""
    beta_adv: NonNegative = 0.1
    """Weight of |A| of the ground truth."""
    r_max: Positive = 1.0
    """Bound of V, and so of Q: the largest return."""
    init_from_lm: bool = True
    """False: the policy starts from random weights when its turn comes (the ablation)."""

    def warmup(self, steps: int) -> int:
        """`value_steps` of a run of so many steps; at least one step is left to each."""
        return max(1, min(steps - 1, round(steps * 9 / 14))) if self.value_steps is None else self.value_steps


def targets(rewards: Tensor, following: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """r + gamma Q(s', .) [d, T], without gradient, from `following` = Q(s, .) of each token's own state [d, T]; r alone at the
    last token of an episode."""
    return (rewards + gamma * next_token_values(following, mask)).detach()


def temporal_difference(taken: Tensor, following: Tensor, batch: OfflineBatch, gamma: float) -> Tensor:
    """(Q(s, a) - target)^2, [d, T]."""
    return (taken - targets(batch.rewards, following, batch.mask, gamma)) ** 2


def value_loss(scores: Scores, batch: OfflineBatch, rl: Rl) -> LossTerms:
    """Of the value network, with the SFT policy's advantages: its own likeliest token has none."""
    settings: Settings = rl.settings
    value = bounded(required(scores.value), settings.r_max)
    taken = advantages(batch.logprobs_ref, batch.best_ref, settings.alpha) + value
    loss = weighted_sum(temporal_difference(taken, value, batch, settings.gamma), batch.mask, batch.weight)
    return LossTerms(loss, {"td": loss.detach(), "value": weighted_sum(value.detach(), batch.mask, batch.weight)})


def policy_loss(scores: Scores, batch: OfflineBatch, rl: Rl) -> LossTerms:
    """Of the policy and its residual, the value network standing still."""
    settings: Settings = rl.settings
    logprobs, best = required(scores.logprobs), required(scores.best)
    value = bounded(required(scores.value) + required(scores.residual), settings.r_max)
    advantage, following = advantages(logprobs, best, settings.alpha), value
    if settings.operator == "conservative":
        following = value + advantages(required(scores.greedy), best, settings.alpha)
    td = weighted_sum(temporal_difference(advantage + value, following, batch, settings.gamma), batch.mask, batch.weight)
    adv, ce = weighted_sum(advantage.abs(), batch.mask, batch.real_weight), imitation(logprobs, batch)
    loss = settings.q_coef * td + settings.beta_adv * adv + settings.beta_ce * ce
    sums = {"loss": loss, "td": td, "ground_truth_advantage": adv, "ground_truth_nll": ce}
    sums["value"] = weighted_sum(value, batch.mask, batch.weight)
    return LossTerms(loss, {name: number.detach() for name, number in sums.items()})


def check(given: Rl, resolved: Rl) -> None:
    """Both networks need steps of their own, and the policy something to learn."""
    settings: Settings = resolved.settings
    if resolved.steps < 2 or settings.warmup(resolved.steps) >= resolved.steps:
        raise ParamsError(
            f"rl.settings.value_steps ({settings.value_steps}) leaves none of the {resolved.steps} steps (rl.steps) to the "
            f"policy; set it below that, and rl.steps to at least 2"
        )
    if not settings.q_coef and not settings.beta_adv and not settings.beta_ce:
        raise ParamsError("rl.settings: q_coef, beta_adv and beta_ce are all 0, and nothing would be learnt; set one above 0")
    if not settings.real_share and (settings.beta_adv or settings.beta_ce):
        raise ParamsError(
            "rl.settings.real_share is 0, and beta_adv and beta_ce are weights of the ground truth; set these to 0, or it above 0"
        )


COMPOSITION = Composition(
    card=CARD, parts={}, settings=Settings, check=check, data="offline", offline=OfflineLosses(policy_loss, value_loss)
)
