"""The protocol's own small helpers."""

from __future__ import annotations

from stages.environments.protocol import opening


def test_opening_joins_task_and_observation():
    assert opening("find the key", "a room") == "find the key\na room"
    assert opening("", "a room") == "a room"
    assert opening("find the key", "") == "find the key"
