"""Types of command-line arguments, which refuse what a flow's settings would, with argparse's message instead of a traceback."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

MOST_STAGES, MOST_RUNS = 64, 256
"""Largest numbers of stages and of experiments side by side."""


def whole_number(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """The argparse type of whole numbers from `lowest` to `highest`."""
    wanted = f"at least {lowest}" if highest is None else f"from {lowest} to {highest}"

    def number(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = lowest - 1
        if found < lowest or (highest is not None and found > highest):
            raise ArgumentTypeError(f"must be a whole number {wanted}, not {text}")
        return found

    return number


port = whole_number(1, 65535)
stages_at_once = whole_number(1, MOST_STAGES)
runs_at_once = whole_number(1, MOST_RUNS)
