"""The schema of imported preference pairs."""

from __future__ import annotations

import pyarrow as pa

from stages.records.episode import MESSAGES

PREFERENCE_SCHEMA = pa.schema(
    [
        ("pair_id", pa.string()),
        ("task_id", pa.string()),
        ("prompt", MESSAGES),
        ("chosen", MESSAGES),
        ("rejected", MESSAGES),
        ("chosen_value", pa.float64()),
        ("rejected_value", pa.float64()),
        ("weight", pa.float64()),
    ]
)
"""Pairs as text: two continuations of the same prompt. `task_id` is "" for pairs without a task."""
