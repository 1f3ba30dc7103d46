"""Training on episodes that forget: each stretch of a row is read under what its turns saw (stages/agent/forgetting.py).

A row becomes as many rows as it has views, each with the mask of its own stretch. Every token of the mask is predicted once, from
the tokens that the engine had in its session, so that importance ratios start at 1. Critics read whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stages.agent.forgetting import Span, views
from stages.algorithms.batch import Extra, TrajectoryBatch

if TYPE_CHECKING:
    from stages.agent.logprobs import States
    from stages.records.episode import Episode


@dataclass(frozen=True)
class Hidden(Extra):
    """What the rows of a batch forget."""

    spans: Tensor
    """[B, K, 3] int64: `stages.agent.forgetting.Span`, padded with 0."""

    def of(self, row: int) -> list[Span]:
        return [(start, stop, since) for start, stop, since in self.spans[row].tolist() if stop > start]


def with_spans(batch: TrajectoryBatch, episodes: Sequence[Episode]) -> TrajectoryBatch:
    """The batch of `episodes` with their hidden spans, if any has some."""
    most = max((len(episode.hidden) for episode in episodes), default=0)
    if not most:
        return batch
    spans = torch.zeros(len(episodes), most, 3, dtype=torch.int64)
    for row, episode in enumerate(episodes):
        for place, span in enumerate(episode.hidden):
            spans[row, place] = torch.tensor(span)
    return batch.with_extra(Hidden(spans))


def seen(states: States, micro: TrajectoryBatch) -> States:
    """`states` of the micro-batch's rows, under what was visible; as they are if nothing is hidden."""
    hidden = micro.get(Hidden)
    return states if hidden is None else partial(_seen, states, hidden)


def _seen(states: States, hidden: Hidden, model: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Hidden states [n, D] at the positions that predict the masked tokens [b, t], in the order of `mask.nonzero()`: views of a
    row follow one another, and so do their stretches."""
    ids, masks = [], []
    for row in range(token_ids.shape[0]):
        for view in views(token_ids.shape[1], hidden.of(row)):
            columns = torch.tensor(view.columns, device=token_ids.device)
            own = mask[row, columns] & (columns >= view.start)
            if bool(own.any()):
                end = int(own.nonzero()[-1]) + 1
                ids.append(token_ids[row, columns[:end]])
                masks.append(own[:end])
    return states(model, _padded(ids), _padded(masks))


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def read_lengths(batch: TrajectoryBatch, hidden: Hidden) -> list[int]:
    """Tokens of each row that a pass reads: those of all its views up to the last one in the mask."""
    lengths = []
    for row, mask in enumerate(batch.mask.tolist()):
        total = 0
        for view in views(len(mask), hidden.of(row)):
            own = [place for place, column in enumerate(view.columns) if column >= view.start and mask[column]]
            total += own[-1] + 1 if own else 0
        lengths.append(total)
    return lengths
