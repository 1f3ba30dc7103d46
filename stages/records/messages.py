"""Converts conversations in the format of OpenAI's API and of chat data sets to plain messages: user and assistant alternate, the
user first, and contents are plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = list[dict[str, str]]
SYSTEM = ("system", "developer")
ROLES = ("user", "assistant")
IGNORED = ("name", "refusal", "audio", "annotations", "thinking", "reasoning_content", "weight")
"""Keys of a message that do not affect its text."""


def well_formed(text: str) -> str:
    """`text` with what no UTF-8 file can hold (halves of surrogate pairs) replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def plain_text(content: Any, where: str) -> str:
    """The text of a message's content: a string, or a list of parts of type text. Raises ValueError for anything else."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and content and all(isinstance(part, Mapping) for part in content):
        kinds = sorted({str(part.get("type")) for part in content} - {"text"})
        if kinds:
            raise ValueError(f"{where} has content of type {', '.join(kinds)}; only text is supported")
        if all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
    raise ValueError(f"{where} must have text as content, not {type(content).__name__}")


def one_message(value: Any, where: str) -> dict[str, str]:
    """Role and text of a message in OpenAI's format. Raises ValueError saying what is wrong with it."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object with role and content, not {type(value).__name__}")
    role = value.get("role")
    if role not in (*SYSTEM, *ROLES):
        raise ValueError(
            f"{where} has the role {role!r}; known roles: system, user, assistant (write a tool's result as a user message)"
        )
    unsupported = sorted(key for key, held in value.items() if held and key not in ("role", "content", *IGNORED))
    if unsupported:
        raise ValueError(f"{where} has {', '.join(unsupported)}, which is not supported; write it into content, or remove it")
    text = plain_text(value.get("content"), where)
    if well_formed(text) != text:
        raise ValueError(f"{where} has half of a surrogate pair, which is no text; do not cut characters in two")
    return {"role": str(role), "content": text}


def plain_messages(value: Any, key: str = "messages") -> Messages:
    """Alternating messages, user first. The text of system messages goes before that of the first user message, on separate
    lines, since policies are trained without a system role. Raises ValueError naming `key` and the message's number."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a non-empty list of messages")
    messages = [one_message(item, f"{key}[{place}]") for place, item in enumerate(value)]
    system: list[str] = []
    while messages and messages[0]["role"] in SYSTEM:
        system.append(messages.pop(0)["content"])
    for place, message in enumerate(messages):
        if message["role"] != ROLES[place % 2]:
            raise ValueError(
                f"{key}[{place + len(system)}] has the role {message['role']} instead of {ROLES[place % 2]}: after system "
                "messages, user and assistant must alternate, the user first; join consecutive messages of the same role"
            )
    if not messages:
        raise ValueError(f"{key} has no user message")
    messages[0] = {"role": "user", "content": "\n".join([*system, messages[0]["content"]])}
    return messages
