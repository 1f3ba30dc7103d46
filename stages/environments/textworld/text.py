"""Extracts a compact observation from the game's output: without titles, traces and status lines."""

from __future__ import annotations

import re

_EVENT = re.compile(r"\[([^\]]+)\]")
_STATUS = re.compile(r"\n>[^\n]*$")
_TITLE = re.compile(r"-= .*? =-")
_SCORE = re.compile(r"Your score has just gone up.*", re.DOTALL)
_SPACES = re.compile(r"\s+")
_SUCCEEDED = " - succeeded"

WON = "*** The End ***"
LOST = "*** You lost! ***"


def succeeded_events(raw: str) -> list[str]:
    """Actions that the game's trace reports as done, in order, without implicit ones (in parentheses)."""
    events = [match.removesuffix(_SUCCEEDED) for match in _EVENT.findall(raw) if match.endswith(_SUCCEEDED)]
    return [event for event in events if "(" not in event and ")" not in event]


def compact(raw: str) -> str:
    """The text for the player, in lower case with single spaces."""
    text = _TITLE.sub(" ", _EVENT.sub(" ", _STATUS.sub("", raw)))
    ending = next((f" {mark}" for mark in (WON, LOST) if mark in text), "")
    text = _SCORE.sub("", text).split("***")[0] + ending
    return _SPACES.sub(" ", text).strip().lower()
