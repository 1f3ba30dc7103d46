"""The schema of imported preference pairs."""

from __future__ import annotations

import pyarrow as pa

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
PREFERENCE_SCHEMA = pa.schema(
    [
        ("pair_id", pa.string()),
        ("task_id", pa.string()),
        ("prompt", _MESSAGES),
        ("chosen", _MESSAGES),
        ("rejected", _MESSAGES),
        ("chosen_value", pa.float64()),
        ("rejected_value", pa.float64()),
        ("weight", pa.float64()),
    ]
)
"""Pairs as text: two continuations of the same prompt. `task_id` is "" for pairs without a task."""
