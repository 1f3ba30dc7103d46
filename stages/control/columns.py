"""Columns of numbers side by side in one array, so that taking some of their rows is one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """[B, sum of widths] of columns [B, width], or [B] for a width of 1."""
    return torch.cat([column if column.dim() == 2 else column[:, None] for column in columns], 1)


def parts(rows: Tensor, widths: Sequence[int | None]) -> list[Tensor]:
    """The columns of rows [B, sum of widths], as views: [B, width], or [B] where the width is None."""
    columns = rows.split([width or 1 for width in widths], 1)
    return [column.squeeze(1) if width is None else column for column, width in zip(columns, widths, strict=True)]
