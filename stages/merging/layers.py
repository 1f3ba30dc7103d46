"""Which layer a tensor belongs to, by its name."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def layer_index(name: str) -> int | None:
    """Layer a tensor belongs to, from the first number in its dotted name; None outside the layers."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None
