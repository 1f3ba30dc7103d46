"""Parses records of other tools as demonstrations or preference pairs, by TRL's keys:

  messages                      a conversation; all its assistant turns are trained on
  prompt, completion            the same, but the assistant turns of the prompt are not trained on
  prompt, chosen, rejected      two continuations of one conversation; the prompt defaults to their common beginning
Each is a list of messages (`role`, `content`); prompt, completion, chosen and rejected may also be plain text: a user message and
answers to it. `task_id` and `domain` optionally name a task of this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.records.messages import ROLES, Messages, plain_messages, plain_text

SHAPES = "messages; prompt and completion; or chosen and rejected, with or without prompt"


@dataclass(frozen=True)
class Demonstration:
    """A conversation to imitate; the first `given` assistant turns are not trained on."""

    messages: Messages
    given: int
    task_id: str | None = None
    inputs: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Texts of the original system and user messages, before the system message is merged into the user message."""


@dataclass(frozen=True)
class Preference:
    """Two continuations of `prompt`; each begins and ends with an assistant turn."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    weight: float = 1.0
    values: tuple[float, float] = (1.0, 0.0)
    """Values of chosen and rejected, in [0, 1]."""
    task_id: str | None = None
    inputs: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """As in `Demonstration`, for the prompt and both sides."""


def as_messages(value: Any, role: str) -> Any:
    """A text as a list of one message of `role`; anything else unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def input_texts(*parts: tuple[Any, str]) -> tuple[str, ...]:
    """Texts of all system and user messages in `parts` of a record: (value, role if the value is plain text)."""
    messages = [message for value, role in parts if value is not None for message in as_messages(value, role)]
    return tuple(plain_text(message["content"], "content") for message in messages if message["role"] != ROLES[1])


def join_parts(prompt: Any, answer: Any, key: str) -> tuple[Messages, int]:
    """The conversation made of `prompt` and `answer`, and the prompt's number of messages.

    Raises ValueError unless the prompt ends with a user turn and the answer, whose key is `key`, begins with an assistant turn.
    """
    before = plain_messages(as_messages(prompt, "user"), "prompt")
    if len(before) % 2 == 0:
        raise ValueError("prompt ends with an assistant turn; it must end with a user turn")
    after = as_messages(answer, "assistant")
    if not isinstance(after, list) or not after:
        raise ValueError(f"{key} must be text or a non-empty list of messages")
    try:
        whole = plain_messages([*before, *after], key)
    except ValueError as error:
        raise ValueError(f"{error}; messages of {key} are numbered from the prompt's first message") from error
    return whole, len(before)


def common_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of two full conversations: the prompt is their common beginning, up to a user turn."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise ValueError("chosen and rejected are plain text, but there is no prompt; add one")
    sides = plain_messages(chosen, "chosen"), plain_messages(rejected, "rejected")
    count = next((place for place, (one, other) in enumerate(zip(*sides, strict=False)) if one != other), min(map(len, sides)))
    count -= (count + 1) % 2
    if count < 1:
        raise ValueError("chosen and rejected have no first user message in common; add a prompt")
    return sides[0][:count], sides[0][count:], sides[1][count:]


def _shown(value: Any) -> str:
    """`repr` of a value, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(values: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    """The number under `key`, or `default` if there is none. Raises ValueError unless it is in [low, high]."""
    value = values.get(key)
    if value is None:
        return default
    # The comparison excludes NaN, infinities, and integers too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{key} must be a number from {low:g} to {high:g}, not {_shown(value)}")
    return float(value)


def parse(values: Mapping[str, Any]) -> Demonstration | Preference:
    """The record as a demonstration or a preference. Raises ValueError if it is invalid."""
    held = {key: value for key, value in values.items() if value is not None}
    task_id = held.get("task_id")
    if task_id is not None and not isinstance(task_id, str):
        raise ValueError(f"task_id must be text, not {_shown(task_id)}")
    if held.get("label") is False:
        raise ValueError("label is false: a rejected answer without a chosen one is not supported; use chosen and rejected")
    if "chosen" in held or "rejected" in held:
        return _preference(held, task_id)
    if "messages" in held:
        messages, given = plain_messages(held["messages"]), 0
        inputs = input_texts((held["messages"], "user"))
    elif "prompt" in held and "completion" in held:
        messages, before = join_parts(held["prompt"], held["completion"], "completion")
        given = before // 2
        inputs = input_texts((held["prompt"], "user"), (held["completion"], "assistant"))
    else:
        raise ValueError(f"a record must have {SHAPES}; this one has {', '.join(sorted(held)) or 'nothing'}")
    if len(messages) < 2:
        raise ValueError("there is no assistant message to train on")
    return Demonstration(messages, given, task_id, inputs)


def _preference(held: Mapping[str, Any], task_id: str | None) -> Preference:
    missing = [key for key in ("chosen", "rejected") if key not in held]
    if missing:
        raise ValueError(f"a preference must have chosen and rejected; {missing[0]} is missing")
    prompt, sides = held.get("prompt"), (held["chosen"], held["rejected"])
    texts = ((prompt, "user"), *((side, "assistant") for side in sides))
    if prompt is None:
        prompt, *sides = common_prompt(*sides)  # type: ignore[assignment]
    parts = []
    for key, side in zip(("chosen", "rejected"), sides, strict=True):
        whole, before = join_parts(prompt, side, key)
        parts.append(whole[before : len(whole) // 2 * 2])  # without messages after the last assistant turn
    if parts[0] == parts[1]:
        raise ValueError("chosen and rejected are the same")
    weight = number(held, "weight", 1.0, 1e-6, 1e6)
    values = number(held, "chosen_value", 1.0, 0.0, 1.0), number(held, "rejected_value", 0.0, 0.0, 1.0)
    given = plain_messages(as_messages(prompt, "user"), "prompt")
    return Preference(given, parts[0], parts[1], weight, values, task_id, input_texts(*texts))
