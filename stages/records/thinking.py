"""Parses the turns of reasoning models (Qwen3, DeepSeek-R1), which contain a thought between two markers before the action
(`model.thinking` in params.yaml).

The thought stays in the token record, token for token: later turns see it, and RL trains on it. Environments, action judges and
votes receive only the action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator

from stages.runtime.validation import Section


def _absent(value: object) -> bool:
    """Unset keys leave hashes and dumps as they are."""
    return not value


class Thinking(Section):
    """The markers around the thoughts of a reasoning model; the action follows the end marker. See docs/thinking.md."""

    start: str = "<think>"
    """Marker that opens a thought."""
    end: str = "</think>"
    """Marker that closes a thought."""
    response: Annotated[tuple[str, ...], Field(max_length=2, exclude_if=_absent)] = ()
    """[start, end]: markers around the action after the thought, such as [<response>, </response>]; the action is the text
    between them, or without them the whole text. []: none."""
    instruction: Annotated[str, Field(exclude_if=_absent)] = ""
    """Begins every episode's first message, for models that were never shown the format. Messages and exports leave it out."""

    @model_validator(mode="after")
    def _apart(self) -> Thinking:
        for name, mark in (("start", self.start), ("end", self.end)):
            if not mark or mark != mark.strip():
                raise ValueError(f"{name} must be a marker without surrounding white space, such as <think>, not {mark!r}")
        if self.start in self.end or self.end in self.start:
            raise ValueError(f"neither of start and end may contain the other; they are {self.start!r} and {self.end!r}")
        if self.response and (len(self.response) != 2 or not all(self.response) or self.response[0] == self.response[1]):
            raise ValueError(
                f"response must be two different markers, such as [<response>, </response>], or []: {list(self.response)}"
            )
        return self


@dataclass(frozen=True)
class ParsedTurn:
    """A parsed turn."""

    action: str
    """What the environment receives; "" if the thought was not closed."""
    thought: str = ""
    message: str = ""
    """The full turn as shown in messages, including thought and markers."""
    finished: bool = True
    """Whether every thought was closed."""


def between(text: str, start: str, end: str) -> str:
    """What follows the first `start`, up to the next `end`; without one of them, the text on that side stays."""
    return text.partition(start)[2 if start in text else 0].partition(end)[0]


def parse_turn(text: str, markers: Thinking | None, opened: str = "") -> ParsedTurn:
    """The thought and the action in a turn's text. The action is the text after the last end marker.

    opened: the start of a thought that the template wrote before the turn, from the start marker on, as DeepSeek-R1's does; it is
    part of the message. Without `markers` the entire text is the action.
    """
    if markers is None:
        action = text.strip()
        return ParsedTurn(action, "", action)
    start, end = markers.start, markers.end
    message = (text if text.lstrip().startswith(start) else opened + text).strip()
    before, _, after = message.rpartition(end)
    finished = start not in after
    thought, action = (before, after) if finished else (message, "")
    action = between(action, *markers.response) if markers.response else action
    return ParsedTurn(action.strip(), thought.replace(start, "").replace(end, "").strip(), message, finished)
