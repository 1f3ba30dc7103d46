"""UNA: fits the policy's implicit reward to an explicit one."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from stages.algorithms.card import Card, Composition
from stages.algorithms.parts.preference import PairScores
from stages.algorithms.settings import Rl
from stages.runtime.validation import Section

CARD = Card(
    slug="una",
    title="UNA",
    paper="Wang et al., UNA: Unifying Alignments, arXiv 2408.15339",
    equation="loss = dist(beta h, z), h = log pi - log pi_ref, z the explicit reward, mean over a pair's two members; dist: mse "
    "(beta h - z)^2, bce -z log sigmoid(beta h) - (1 - z) log sigmoid(-beta h), logistic -log sigmoid(beta D)",
    assumptions="pairs of data/annotated/<domain>, whose members are used as single examples; z in [0, 1]: whether the "
    "continuation succeeds (preference.level: step: how often the policy succeeds after the action)",
    reduces_to="settings.distance logistic: DPO; bce at h = 0: log 2",
    tested_by="tests/algorithms/test_survey.py",
    switch="rl.algorithm: una",
)


class Settings(Section):
    distance: Literal["mse", "bce", "logistic"] = "mse"
    """Distance between implicit and explicit reward; logistic uses only the order of explicit rewards."""


def preference(pairs: PairScores, rl: Rl) -> Tensor:
    """Loss per pair, [P]."""
    beta, distance = rl.preference.beta, rl.settings.distance
    if distance == "logistic":
        return -logsigmoid(beta * pairs.difference)
    parts = zip(pairs.implicit, (pairs.win_value, pairs.lose_value), strict=True)
    if distance == "mse":
        return sum((beta * h - z) ** 2 for h, z in parts) / 2
    return sum(binary_cross_entropy_with_logits(beta * h, z, reduction="none") for h, z in parts) / 2


COMPOSITION = Composition(card=CARD, parts={}, pieces={"preference": preference}, settings=Settings, data="pairs")
