"""Parses the turns of reasoning models (Qwen3, DeepSeek-R1), which contain a thought between two markers before the action
(`model.thinking` in params.yaml).

The thought stays in the token record, token for token: later turns see it, and RL trains on it. Environments, action judges and
votes receive only the action.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Section

Occurrence = Literal["first", "last"]


def _absent(value: object) -> bool:
    """Unset keys leave hashes and dumps as they are."""
    return not value


def _is_last(value: object) -> bool:
    """As `_absent`, for `occurrence`."""
    return value == "last"


class Thinking(Section):
    """The markers around the thoughts of a reasoning model; the action follows the end marker. See docs/thinking.md."""

    start: str = "<think>"
    """Marker that opens a thought."""
    end: str = "</think>"
    """Marker that closes a thought."""
    occurrence: Annotated[Occurrence, Field(exclude_if=_is_last)] = "last"
    """After which end marker the action begins, if a turn has several. Environments and judges read by the same one."""
    response: Annotated[tuple[str, ...], Field(max_length=2, strict=False, exclude_if=_absent)] = ()
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
    marked: bool = field(default=False, compare=False)
    """Whether the turn has the end of a thought, and the markers of `Thinking.response` around the action if there are any."""


def between(text: str, start: str, end: str) -> str:
    """What follows the first `start`, up to the next `end`; without one of them, the text on that side stays."""
    return text.partition(start)[2 if start in text else 0].partition(end)[0]


def _encloses(text: str, marks: tuple[str, ...]) -> bool:
    """Whether `text` has the first of the marks, and the second after it; True without marks."""
    return not marks or marks[1] in text.partition(marks[0])[2]


def parse_turn(text: str, markers: Thinking | None, opened: str = "") -> ParsedTurn:
    """The thought and the action in a turn's text. The action is the text after the end marker that `markers.occurrence` says,
    or the entire text of a turn without markers.

    opened: the start of a thought that the template wrote before the turn, from the start marker on, as DeepSeek-R1's does; it is
    part of the message. Without `markers` the entire text is the action.
    """
    if markers is None:
        action = text.strip()
        return ParsedTurn(action, "", action)
    start, end = markers.start, markers.end
    message = (text if text.lstrip().startswith(start) else opened + text).strip()
    closed = end in message
    if not closed:
        before, after = "", message
    elif markers.occurrence == "first":
        before, _, after = message.partition(end)
    else:
        before, _, after = message.rpartition(end)
    # After the first end marker everything is the action; after the last one a new thought may have begun.
    finished = start not in after or (closed and markers.occurrence == "first")
    thought, action = (before, after) if finished else (message, "")
    marked = closed and finished and _encloses(action, markers.response)
    action = between(action, *markers.response) if markers.response else action
    return ParsedTurn(action.strip(), thought.replace(start, "").replace(end, "").strip(), message, finished, marked)
