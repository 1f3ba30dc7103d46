"""Reasoning models (Qwen3, DeepSeek-R1) think before they act: a turn holds a block between two marks, and the action behind it
(`model.thinking` in params.yaml).

The block is the policy's own and stays in the token record, token for token: later turns see it, and RL trains it. Environments,
judges of actions and votes get the action alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import model_validator

from stages.runtime.validation import Section


class Thinking(Section):
    """What encloses the thoughts of a reasoning model in its turns; the action is what follows. See docs/thinking.md."""

    start: str = "<think>"
    """Mark that opens a thought, such as <think>."""
    end: str = "</think>"
    """Mark that closes it, such as </think>."""

    @model_validator(mode="after")
    def _apart(self) -> Thinking:
        for name, mark in (("start", self.start), ("end", self.end)):
            if not mark or mark != mark.strip():
                raise ValueError(f"{name} must be a mark without white space around it, such as <think>, not {mark!r}")
        if self.start in self.end or self.end in self.start:
            raise ValueError(f"start and end must be told apart, and they are {self.start!r} and {self.end!r}")
        return self


@dataclass(frozen=True)
class Said:
    """A turn taken apart."""

    action: str
    """What the environment gets; "" where the thought has no end."""
    thought: str = ""
    message: str = ""
    """The whole turn as a message shows it, thought and marks included."""
    finished: bool = True
    """Whether every thought was closed."""


def take_apart(text: str, markers: Thinking | None, opened: str = "") -> Said:
    """The thought and the action in a turn's text. The action is what follows the last end mark.

    opened: what the template has written of a thought before the turn, the start mark first, as DeepSeek-R1's does; it belongs to
    the message. Without `markers` the whole text is the action.
    """
    if markers is None:
        action = text.strip()
        return Said(action, "", action)
    start, end = markers.start, markers.end
    message = (text if text.lstrip().startswith(start) else opened + text).strip()
    before, _, after = message.rpartition(end)
    finished = start not in after
    thought, action = (before, after) if finished else (message, "")
    return Said(action.strip(), thought.replace(start, "").replace(end, "").strip(), message, finished)
