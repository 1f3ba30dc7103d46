"""Parses records of other tools as demonstrations or preference pairs, by TRL's keys:

  messages                      a conversation whose assistant turns are all to be learnt
  prompt, completion            the same, without the assistant turns of the prompt
  prompt, chosen, rejected      two continuations of one conversation; without a prompt, it is their common beginning
Each is a list of messages (`role`, `content`); prompt, completion, chosen and rejected may also be texts: a user's message and
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
    """A conversation to imitate; the first `given` assistant turns are not learnt."""

    messages: Messages
    given: int
    task_id: str | None = None
    inputs: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Texts of the original system and user messages, before a system message is joined to the user's."""


@dataclass(frozen=True)
class Preference:
    """Two continuations of `prompt`, each beginning with an assistant turn and ending with one."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    weight: float = 1.0
    values: tuple[float, float] = (1.0, 0.0)
    """Values of chosen and rejected, in [0, 1]."""
    task_id: str | None = None
    inputs: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """As in `Demonstration`, of the prompt and both sides."""


def as_messages(value: Any, role: str) -> Any:
    """A text as a single message of `role`; a list unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def input_texts(*parts: tuple[Any, str]) -> tuple[str, ...]:
    """Texts of all system and user messages in parsed parts of a record: (value, role of a text)."""
    messages = [message for value, role in parts if value is not None for message in as_messages(value, role)]
    return tuple(plain_text(message["content"], "content") for message in messages if message["role"] != ROLES[1])


def join_parts(prompt: Any, answer: Any, key: str) -> tuple[Messages, int]:
    """A conversation given in two parts, and the number of messages in the first part.

    Raises ValueError unless the prompt ends with a user's turn and the answer, called `key`, begins with an assistant's.
    """
    before = plain_messages(as_messages(prompt, "user"), "prompt")
    if len(before) % 2 == 0:
        raise ValueError("prompt ends with an assistant turn; it must end with a user turn")
    after = as_messages(answer, "assistant")
    if not isinstance(after, list) or not after:
        raise ValueError(f"{key} must be a text or a non-empty list of messages")
    try:
        whole = plain_messages([*before, *after], key)
    except ValueError as error:
        raise ValueError(f"{error}; messages of {key} are numbered from the prompt's first message") from error
    return whole, len(before)


def common_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """prompt, chosen and rejected of two full conversations: the prompt is their common beginning, up to a user's turn."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise ValueError("chosen and rejected are texts without a prompt; add the prompt")
    sides = plain_messages(chosen, "chosen"), plain_messages(rejected, "rejected")
    count = next((place for place, (one, other) in enumerate(zip(*sides, strict=False)) if one != other), min(map(len, sides)))
    count -= (count + 1) % 2
    if count < 1:
        raise ValueError("chosen and rejected have no first user message in common, and there is no prompt")
    return sides[0][:count], sides[0][count:], sides[1][count:]


def _shown(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(values: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    """A record's number in [low, high], or `default` if it has none. Raises ValueError."""
    value = values.get(key)
    if value is None:
        return default
    # The comparison excludes NaN, infinities, and integers too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{key} must be a number from {low:g} to {high:g}, not {_shown(value)}")
    return float(value)


def parse(values: Mapping[str, Any]) -> Demonstration | Preference:
    """A parsed record. Raises ValueError if it is invalid."""
    held = {key: value for key, value in values.items() if value is not None}
    task_id = held.get("task_id")
    if task_id is not None and not isinstance(task_id, str):
        raise ValueError(f"task_id must be text, not {_shown(task_id)}")
    if held.get("label") is False:
        raise ValueError("label is false: a rejected answer without a chosen one; only pairs of both are supported")
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
        raise ValueError("it has no assistant message, so there is nothing to learn")
    return Demonstration(messages, given, task_id, inputs)


def _preference(held: Mapping[str, Any], task_id: str | None) -> Preference:
    lacking = [key for key in ("chosen", "rejected") if key not in held]
    if lacking:
        raise ValueError(f"a preference must have chosen and rejected; {lacking[0]} is missing")
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
