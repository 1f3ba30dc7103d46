"""Conversations of other tools' agents as records of messages: user and assistant alternate, tools' results are user messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stages.records.messages import Messages, plain_text


class Conversation:
    """Collects messages; consecutive ones of one side become one message, on separate lines."""

    def __init__(self) -> None:
        self.messages: Messages = []
        self.given = 0
        """Number of messages that are context: not trained on."""

    def add(self, role: str, text: str, context: bool = False) -> None:
        """`role`: user or assistant. A conversation begins with the user: an assistant's first words open an empty request."""
        if not self.messages and role == "assistant":
            self.messages.append({"role": "user", "content": ""})
        if self.messages and self.messages[-1]["role"] == role:
            held = self.messages[-1]
            held["content"] = "\n".join(filter(None, [held["content"], text]))
        else:
            self.messages.append({"role": role, "content": text})
        if context:
            self.given = len(self.messages)

    def record(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """A record that `stages.exchange.parsing` reads. Raises ValueError if there is nothing to learn from."""
        last = max((place for place, message in enumerate(self.messages) if message["role"] == "assistant"), default=-1)
        messages = self.messages[: last + 1]
        if last < self.given:
            raise ValueError("there is no message of the agent to train on")
        if self.given < 2:
            return {"messages": messages, **about}
        given = self.given + (self.given + 1) % 2  # a prompt ends with the user
        return {"prompt": messages[:given], "completion": messages[given:], **about}


def text_of(content: Any, where: str) -> str:
    """Text of a message's or result's content: a string, parts of text, or nothing. Raises ValueError for images and audio."""
    return "" if content is None or content == [] else plain_text(content, where)


def calls_text(calls: Sequence[Mapping[str, Any]], name: str) -> str:
    """Calls of tools as lines of JSON; `name`: the key of the tool's name."""
    return "\n".join(
        json.dumps({"name": call.get(name), "arguments": call.get("arguments")}, ensure_ascii=False, sort_keys=True)
        for call in calls
    )
