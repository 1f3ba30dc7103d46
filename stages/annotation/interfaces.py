"""What tree search needs of others: a chat format, environments, and a reader of leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stages.engine.engine import Engine
from stages.environments.protocol import Environment


class ChatFormat(Protocol):
    """The part of `stages.agent.chat.Chat` that the search uses."""

    def prompt_tokens(self, text: str) -> list[int]: ...

    def prompt(self, text: str, guidance: str = "", examples: Sequence[Mapping[str, str]] = ()) -> Any: ...

    def closing_tokens(self, turn_ids: Sequence[int]) -> list[int]: ...

    def observation_tokens(self, text: str) -> list[int]: ...

    def observation_text(self, token_ids: Sequence[int]) -> tuple[int, int]: ...

    def action_text(self, turn_ids: Sequence[int]) -> str: ...

    def argument_tokens(self, turn_ids: Sequence[int]) -> Sequence[int]: ...


class Environments(Protocol):
    """The part of `stages.agent.environment_pool.EnvironmentPool` that the search uses."""

    def take(self) -> Environment: ...

    def give_back(self, environment: Environment) -> None: ...


class Reader(Protocol):
    """A value model over sessions of `engine`, which may be the policy's (stages/annotation/leaf_values.py)."""

    engine: Engine

    def values(self, sessions: Sequence[int]) -> list[float]:
        """The expected return from the end of each session on."""
        ...
