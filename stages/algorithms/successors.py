"""The next policy token of each policy token: what a value bootstraps from."""

from __future__ import annotations

import torch
from torch import Tensor


def successors(values: Tensor, mask: Tensor, turn: Tensor | None = None) -> Tensor:
    """values [b, T] at the next token of the row where `mask` [b, T], on each token of the mask; 0 after the last one and off the
    mask. With turn [b, T]: 0 after the last token of each turn too."""
    width = mask.shape[1]
    places = torch.arange(width, device=mask.device).expand_as(mask)
    # The first token of the mask at each place or behind it, then behind it alone; `width` where there is none.
    at = torch.where(mask, places, width).flip(1).cummin(1).values.flip(1)
    behind = torch.cat([at[:, 1:], torch.full_like(at[:, :1], width)], 1)
    found = torch.cat([values, torch.zeros_like(values[:, :1])], 1).gather(1, behind)
    there = mask & (behind < width)
    if turn is not None:
        there = there & (torch.cat([turn, torch.full_like(turn[:, :1], -1)], 1).gather(1, behind) == turn)
    return torch.where(there, found, torch.zeros_like(found))


def is_last(mask: Tensor) -> Tensor:
    """Which tokens are the last of the mask in their row, [b, T] bool."""
    return mask & (successors(mask.float(), mask) == 0)
