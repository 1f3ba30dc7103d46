"""Best-of-N fine-tuning (RAFT, ReST, rejection sampling): maximum likelihood on episodes with a sufficient return."""

from __future__ import annotations

from typing import Literal

import torch

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.card import Card, Composition
from stages.algorithms.settings import Rl
from stages.runtime.validation import Section

CARD = Card(
    slug="bon_sft",
    title="Best-of-N fine-tuning",
    paper="Dong et al., RAFT, arXiv 2304.06767; Gulcehre et al., ReST, arXiv 2308.08998",
    equation="loss = -[R >= threshold] log pi(y_t), mean over the tokens of the selected episodes; settings.keep best: those "
    "with the largest return of their group, if it reaches the threshold",
    assumptions="on-policy episodes (RAFT); episodes below the threshold have no weight, also in denominators",
    reduces_to="all returns equal to 1: supervised fine-tuning on the episodes; returns 0 and 1, token_mean: REINFORCE without "
    "baseline times tokens / tokens of successes",
    tested_by="tests/algorithms/test_survey.py",
    switch="rl.algorithm: bon_sft",
)


class Settings(Section):
    keep: Literal["threshold", "best"] = "threshold"
    """`best`: only the episodes with the largest return of each group."""
    threshold: float = 1.0
    """Smallest return of an episode that is trained on."""


def group_resampling(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    """`weight` [B]: 1 for selected episodes, 0 for the others."""
    kept = batch.rewards >= rl.settings.threshold
    if rl.settings.keep == "best":
        best = torch.full((int(batch.group.max()) + 1,), -torch.inf).scatter_reduce(0, batch.group, batch.rewards, "amax")
        kept &= batch.rewards >= best[batch.group]
    return batch.with_(weight=kept.float()).with_metrics(kept=float(kept.float().mean()), skipped=float(not bool(kept.any())))


def advantage(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    """`advantages` [B, T]: 1 on policy tokens."""
    return batch.with_(advantages=batch.mask.float())


COMPOSITION = Composition(
    card=CARD,
    parts={"loss.kind": "policy_gradient"},
    pieces={"group_resampling": group_resampling, "advantage": advantage},
    settings=Settings,
)
