"""Actions as text."""

from __future__ import annotations


def action_key(action: str) -> str:
    """The action in lower case with single spaces; equal for actions that differ only in case or white space."""
    return " ".join(action.lower().split())
