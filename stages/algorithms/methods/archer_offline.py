"""ArCHer on an offline dataset: implicit Q-learning of turns, and advantage-weighted regression of their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.card import Card, Composition
from stages.algorithms.settings import Rl
from stages.runtime.validation import Positive, Section
from stages.values.settings import HeadParams

CARD = Card(
    slug="archer_offline",
    title="ArCHer, offline",
    paper="Zhou et al., arXiv 2402.19446; IQL arXiv 2110.06169",
    equation="Q_i as in archer; V_i by expectile regression on u = Q'_i(s,a) - V_i(s): |tau - 1(u <= 0)| u^2; loss = -min(exp("
    "inv_temp A), max_weight) sum_j log pi(a_j) on the recorded actions",
    assumptions="offline episodes (replay.records) with the environment's rewards; clipping the weights is ours. The loss is a "
    "mean over episodes, each the sum of its turns; the published one, a mean over turns, is smaller by the number of turns, for "
    "which Adam compensates and max_grad_norm does not",
    reduces_to="inv_temp to 0: behaviour cloning of the records; expectile 0.5: V is the mean of the records' Q; to 1: the Q of "
    "the best recorded action",
    tested_by="tests/algorithms/test_archer.py, tests/values/test_turn_critic.py, tests/training/test_archer.py",
    switch="rl.algorithm: archer_offline",
)


class Settings(Section):
    inv_temp: Positive = 1.0
    """Factor on the advantage in the exponent; larger values favour the best actions more."""
    max_weight: Positive = 20.0
    """Weights are clipped at this value."""


def loss(logprobs: Tensor, batch: TrajectoryBatch, rl: Rl) -> Tensor:
    """-min(exp(inv_temp A), max_weight) log p per token, [b, T]."""
    assert batch.advantages is not None
    weights = torch.exp(rl.settings.inv_temp * batch.advantages).clamp(max=rl.settings.max_weight)
    return -weights * logprobs


COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.estimator": "utterance",
        "advantage.gamma": 0.99,
        "loss.aggregation": "seq_mean_token_sum",
        "critic.head": HeadParams(loss="mse"),
        "critic.learning_rate": 3e-4,
        "replay.records": ["rollouts", "demonstrations", "games"],
        "replay.tau": 0.05,
        "replay.value_target": "expectile",
        "replay.actions": "recorded",
    },
    pieces={"loss": loss},
    settings=Settings,
    data="offline_replay",
)
