"""A reasoning model's turn in replies of the agent's server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny import make_tiny_tokenizer

from stages.agent.chat import Chat
from stages.engine.engine import Sampling, Turn
from stages.records.thinking import Thinking
from stages.serving.app import Agent, streamed
from stages.serving.schemas import ChatRequest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<think>a key</think>take the key", {"content": "take the key", "reasoning_content": "a key"}),
        ("take the key", {"content": "take the key"}),
        ("<think>a key", {"content": "", "reasoning_content": "a key"}),
    ],
)
def test_reasoning_is_separate_from_content(text: str, message: dict[str, Any]) -> None:
    """Contract: clients act on `content`; the reasoning is in `reasoning_content`, as with other servers, streamed or not."""
    chat = Chat(make_tiny_tokenizer(), Thinking())
    agent = Agent(cast(Any, SimpleNamespace()), chat, {}, "hash", Sampling(), 64)
    request = ChatRequest(model="merged", messages=[])
    token_ids = tuple(chat.tokenizer(text, add_special_tokens=False)["input_ids"])
    choice = agent.chat_choice(request, 0, Turn(0, token_ids, (-1.0,) * len(token_ids), "stop"))
    assert {key: value for key, value in choice["message"].items() if key not in ("role", "refusal")} == message
    reply = {"object": "chat.completion", "choices": [choice], "usage": {}}
    first = json.loads(next(streamed(reply, request)).removeprefix("data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", **message}
