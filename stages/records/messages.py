"""Conversations from outside, in the form of OpenAI's API and of chat data sets, as this project keeps them: messages of user and
assistant by turns, the user first, their content plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = list[dict[str, str]]
SYSTEM = ("system", "developer")
ROLES = ("user", "assistant")
WORDLESS = ("name", "refusal", "audio", "annotations", "thinking", "reasoning_content", "weight")
"""Keys of a message that say nothing of its text."""


def plain_text(content: Any, where: str) -> str:
    """A message's content as text: a string, or a list of parts of type text. Raises ValueError for anything else."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and content and all(isinstance(part, Mapping) for part in content):
        kinds = sorted({str(part.get("type")) for part in content} - {"text"})
        if kinds:
            raise ValueError(f"{where} has content of type {', '.join(kinds)}; only text is understood")
        if all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
    raise ValueError(f"{where} needs content that is text, not {type(content).__name__}")


def one_message(value: Any, where: str) -> dict[str, str]:
    """A message of OpenAI's form, its role and text alone. Raises ValueError saying what is wrong with it."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object with role and content, not {type(value).__name__}")
    role = value.get("role")
    if role not in (*SYSTEM, *ROLES):
        raise ValueError(
            f"{where} has the role {role!r}; there are system, user and assistant (what a tool answers is the user's)"
        )
    strange = sorted(key for key, held in value.items() if held and key not in ("role", "content", *WORDLESS))
    if strange:
        raise ValueError(f"{where} has {', '.join(strange)}, which can't be told in text; write it into content, or leave it out")
    return {"role": str(role), "content": plain_text(value.get("content"), where)}


def plain_messages(value: Any, key: str = "messages") -> Messages:
    """Messages by turns, user first. What a system message says is put before the first user's, on a line of its own, since the
    policy knows no such role. Raises ValueError naming `key` and the message's number."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a list of messages, one at least")
    messages = [one_message(item, f"{key}[{place}]") for place, item in enumerate(value)]
    told: list[str] = []
    while messages and messages[0]["role"] in SYSTEM:
        told.append(messages.pop(0)["content"])
    for place, message in enumerate(messages):
        if message["role"] != ROLES[place % 2]:
            raise ValueError(
                f"{key}[{place + len(told)}] is the {message['role']}'s, where the {ROLES[place % 2]}'s turn is: after system "
                "messages, user and assistant take turns, the user first; join messages of one side"
            )
    if not messages:
        raise ValueError(f"{key} has no user message")
    messages[0] = {"role": "user", "content": "\n".join([*told, messages[0]["content"]])}
    return messages
