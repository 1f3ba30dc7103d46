"""Training on tokens drawn under top-p or top-k: the tokens that each was drawn from.

The engine draws y_t from softmax over a set S_t of the policy's most likely tokens. The training pass takes its
log-probabilities over the same set, log pi(y_t) - log sum_{y in S_t} pi(y): with the same weights they equal the engine's, so
that importance ratios start at 1, and the gradient is that of the distribution that acts. S_t is a record of the draw and stays
as it is while the policy changes; a set computed anew by the training pass could leave out the drawn token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.algorithms.batch import Extra, TrajectoryBatch

if TYPE_CHECKING:
    from torch import Tensor

    from stages.records.episode import Episode


@dataclass(frozen=True)
class Kept(Extra):
    """The tokens that those of a batch were drawn from."""

    PER_TOKEN = ("tokens",)

    tokens: Tensor
    """[B, T, K] int32, padded with -1; -1 alone: the whole vocabulary; -2 - id: without these (`Turn.kept`)."""


def with_kept(batch: TrajectoryBatch, episodes: Sequence[Episode]) -> TrajectoryBatch:
    """The batch of `episodes` with their kept tokens, if any has some."""
    import numpy as np
    import torch

    width = max((len(tokens) for episode in episodes for tokens in episode.kept), default=0)
    if not width:
        return batch
    kept = np.full((*batch.token_ids.shape, width), -1, dtype=np.int32)
    for row, episode in enumerate(episodes):
        for column, tokens in enumerate(episode.kept):
            kept[row, column, : len(tokens)] = tokens
    return batch.with_extra(Kept(torch.from_numpy(kept)))


def kept_of(batch: TrajectoryBatch) -> Tensor | None:
    """`Kept.tokens` of the batch, if it has them."""
    kept = batch.get(Kept)
    return None if kept is None else kept.tokens
