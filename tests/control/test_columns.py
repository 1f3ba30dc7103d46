from __future__ import annotations

import torch

from stages.control.columns import parts, side_by_side


def test_parts_are_the_columns() -> None:
    columns = [torch.randn(4, 3), torch.randn(4), torch.randn(4, 1)]
    rows = side_by_side(columns)
    assert rows.shape == (4, 5)
    for found, expected in zip(parts(rows, [3, None, 1]), columns, strict=True):
        assert torch.equal(found, expected)
