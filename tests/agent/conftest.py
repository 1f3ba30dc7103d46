"""The tiny policy, loaded, and its chat format."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.agent.chat import Chat
from stages.agent.policy import Policy, load_policy


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Policy:
    return load_policy(tiny_policy)


@pytest.fixture(scope="module")
def chat(policy: Policy) -> Chat:
    return Chat(policy.tokenizer)
