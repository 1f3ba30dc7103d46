"""Numbers that flows take on the command line and in their settings."""

from __future__ import annotations

from stages.runtime.command import whole_number

MOST_STAGES, MOST_RUNS = 64, 256
"""Largest numbers of stages and of experiments side by side."""

stages_at_once = whole_number(1, MOST_STAGES)
runs_at_once = whole_number(1, MOST_RUNS)
