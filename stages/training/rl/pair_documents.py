"""Histories with continuations, as padded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.annotation.continuations import Continuation
from stages.training.common.batches import padded


@dataclass(frozen=True)
class Documents:
    """D histories, each with a continuation, padded on the right to T tokens."""

    token_ids: Tensor
    """[D, T] int64."""
    mask: Tensor
    """[D, T] bool: policy tokens of the continuation."""

    @classmethod
    def of(cls, parts: Sequence[tuple[tuple[int, ...], Continuation]]) -> Documents:
        """Documents of (history, continuation), in order."""
        tokens = [[*history, *continuation.token_ids] for history, continuation in parts]
        mask = [[*([False] * len(history)), *continuation.policy] for history, continuation in parts]
        return cls(padded(tokens, 0, torch.int64), padded(mask, False, torch.bool))

    def rows(self, index: Sequence[int]) -> Documents:
        """Some documents, cut to the longest."""
        mask = self.mask[torch.tensor(index)]
        width = int((mask * torch.arange(1, mask.shape[1] + 1)).amax())
        return Documents(self.token_ids[torch.tensor(index), :width], mask[:, :width])

    @property
    def last(self) -> Tensor:
        """[D] int64: the place of each document's last policy token."""
        return (self.mask * torch.arange(1, self.mask.shape[1] + 1)).amax(1) - 1
