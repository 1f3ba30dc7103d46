"""DRO: direct reward optimisation, regression of the implicit reward on single examples."""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.card import Card, Composition
from stages.algorithms.parts.preference import PairScores
from stages.algorithms.settings import Rl

CARD = Card(
    slug="dro",
    title="DRO",
    paper="Richemond et al., Offline Regularised RL for LLM Alignment, arXiv 2405.19107",
    equation="loss = 0.5 (R - V(x) - beta h)^2, h = log pi - log pi_ref, beta the paper's tau, mean over a pair's two members",
    assumptions="pairs of data/annotated/<domain>, R: whether the continuation succeeds (preference.level: step: how often the "
    "policy succeeds after the action). V(x) is not a network but the minimiser of the loss for a history with just these two "
    "examples, the mean of R - beta h, without gradient (ours)",
    reduces_to="with that V: (R_w - R_l - beta D)^2 / 8, the same gradient; 0 at D = (R_w - R_l) / beta, for R 1 and 0 IPO's "
    "target with half the beta",
    tested_by="tests/algorithms/test_survey.py",
    switch="rl.algorithm: dro",
)


def examples(h: Tensor, rewards: Tensor, value: Tensor, tau: float) -> Tensor:
    """0.5 (R - V - tau h)^2 of single examples, all [N]."""
    return 0.5 * (rewards - value - tau * h) ** 2


def preference(pairs: PairScores, rl: Rl) -> Tensor:
    """Loss per pair, [P]."""
    tau, (win, lose) = rl.preference.beta, pairs.implicit
    value = (pairs.win_value - tau * win + pairs.lose_value - tau * lose).detach() / 2
    return (examples(win, pairs.win_value, value, tau) + examples(lose, pairs.lose_value, value, tau)) / 2


COMPOSITION = Composition(card=CARD, parts={}, pieces={"preference": preference}, data="pairs")
