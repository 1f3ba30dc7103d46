"""ROVER: fits the value of the uniform random policy, whose softmax is the policy; no policy iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from stages.agent.logprobs import Vocabulary
from stages.algorithms.batch import TrajectoryBatch, is_last_token, next_token_values
from stages.algorithms.card import Card, Composition
from stages.algorithms.parts.loss import MeanLogprobs, advantages_of, log_ratio
from stages.algorithms.settings import Rl
from stages.runtime.validation import NonNegative, ParamsError, Positive, Section

CARD = Card(
    slug="rover",
    title="ROVER",
    paper="He et al., arXiv 2509.24981",
    equation="Q_t = rho (log pi - log pi_old) of the token; Q'_t = rho times the mean over the vocabulary of (log pi - log "
    "pi_old) at the next token, 0 after the last; loss = (Q_t - sg[A + beta_next Q'_t])^2, A = R - group mean; settings.form "
    "absolute: Q = rho times the logit, target the mean of Q over the vocabulary at the next token, the return at the last",
    assumptions="the theorem requires returns of 0 or 1 and a tree (it does not hold for graded returns, merging states or "
    "chance); four updates per step (rl.minibatches: null); Q' is 0 at the end of a turn, where the environment acts "
    "(settings.across_turns); pi_old is computed by the training pass; rl.advantage.std: group and rl.loss.aggregation: "
    "token_mean are as in the authors' code; the absolute form initialised with a language model's logits is ours",
    reduces_to="a step's first update: REINFORCE with the group's mean as baseline, times 2 rho; beta_next 0: regression of "
    "the log ratio on A; absolute, rho to 0: greedy on the random policy's Q, which is optimal in binary trees",
    tested_by="tests/algorithms/test_rover.py",
    switch="rl.algorithm: rover",
)


class Settings(Section):
    form: Literal["relative", "absolute"] = "relative"
    """relative: Q is relative to the policy that played the step; absolute: the logits themselves are Q / rho."""
    rho: Positive = 1.0
    """Temperature: the policy is softmax(Q / rho)."""
    beta_next: NonNegative = 1.0
    """relative: weight of the successor's term; with 0, the distribution over the vocabulary is not needed."""
    across_turns: bool | None = None
    """Whether the successor of a turn's last token is the first token of the next turn; null: only in the absolute form, which
    would otherwise learn nothing from later turns."""


def derive(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """`across_turns`, unless it is set."""
    across = settings.form == "absolute" if settings.across_turns is None else settings.across_turns
    return settings.model_copy(update={"across_turns": across})


def values_and_targets(logprobs: Tensor, batch: TrajectoryBatch, rl: Rl, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """Q [b, T] of the tokens, and its targets without gradient. Raises ValueError if the batch or `vocabulary` lacks what the
    form needs."""
    settings: Settings = rl.settings
    advantages, absolute = advantages_of(batch), settings.form == "absolute"
    turn = None if settings.across_turns else batch.turn
    if not absolute and not settings.beta_next:
        return settings.rho * log_ratio(logprobs, batch), advantages
    means = batch.get(MeanLogprobs)
    if vocabulary is None or not (absolute or means):
        raise ValueError(
            f"rover in its {settings.form} form needs means over the vocabulary, which were not computed; see "
            f"Algorithm.needs_vocabulary and needs_rescoring"
        )
    if absolute:
        following = next_token_values(settings.rho * (vocabulary.mean + vocabulary.normaliser).detach(), batch.mask, turn)
        return settings.rho * (logprobs + vocabulary.normaliser), torch.where(is_last_token(batch.mask), advantages, following)
    assert means is not None
    following = next_token_values(settings.rho * (vocabulary.mean - means.old), batch.mask, turn)
    return settings.rho * log_ratio(logprobs, batch), advantages + settings.beta_next * following.detach()


def loss(logprobs: Tensor, batch: TrajectoryBatch, rl: Rl, vocabulary: Vocabulary | None = None) -> Tensor:
    """(Q - target)^2 per token, [b, T], 0 off the mask."""
    values, targets = values_and_targets(logprobs, batch, rl, vocabulary)
    return torch.where(batch.mask, (values - targets) ** 2, torch.zeros_like(logprobs))


def needs_vocabulary(rl: Rl) -> bool:
    settings: Settings = rl.settings
    return settings.form == "absolute" or settings.beta_next > 0


def needs_rescoring(rl: Rl) -> bool:
    return rl.settings.form == "relative"


def check(given: Rl, resolved: Rl) -> None:
    """Raise ParamsError for settings of policy losses, which the squared error replaces, and, in the absolute form, of
    advantages."""
    settings: Settings = resolved.settings
    advantage = resolved.advantage
    if resolved.loss.kind != "own":
        raise ParamsError(
            f"rl.algorithm rover consists of a loss, which rl.loss.kind {resolved.loss.kind} would replace; set it to null, or "
            f"choose another algorithm"
        )
    if settings.form == "relative" and resolved.epochs * resolved.minibatches == 1:
        remedy = (
            "set rl.minibatches to null, which is 4" if "minibatches" in given.model_fields_set else "raise rl.tasks_per_step"
        )
        raise ParamsError(
            f"rl.algorithm rover with one update per step (rl.minibatches 1, rl.epochs 1) is REINFORCE, since Q and the "
            f"successor's term are 0 before the first update; {remedy}, or raise rl.epochs, or set rl.algorithm to reinforce"
        )
    if settings.form == "absolute":
        if advantage.mean != "none" or advantage.std != "none" or advantage.whiten:
            raise ParamsError(
                f"rl.settings.form: absolute fits raw returns, but rl.advantage has mean {advantage.mean}, std {advantage.std}, "
                f"whiten {advantage.whiten}; set mean and std to none, and whiten to null"
            )
        if resolved.credit.kind != "outcome":
            raise ParamsError(
                f"rl.settings.form: absolute fits the return at an episode's last token, which rl.credit.kind: "
                f"{resolved.credit.kind} would replace; set it to outcome, or form to relative"
            )
        if "beta_next" in settings.model_fields_set:
            raise ParamsError("rl.settings.beta_next has no effect in the absolute form, where it is always 1; remove it")


COMPOSITION = Composition(
    card=CARD,
    parts={"minibatches": 4, "advantage.mean": "group", "loss.aggregation": "seq_mean_token_mean"},
    pieces={"loss": loss},
    settings=Settings,
    derive=derive,
    vocabulary=needs_vocabulary,
    rescored=needs_rescoring,
    check=check,
)
