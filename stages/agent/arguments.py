"""What environments are told about how sure the policy was of an action's argument, the query in `search <query>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stages.environments.protocol import Environment
from stages.records.episode import Owner


class Written(Protocol):
    """A turn of an engine, or one as a search tree holds it."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def owners(self) -> Sequence[int]: ...


class Arguments(Protocol):
    """The part of `Chat` that finds a turn's argument."""

    def argument_tokens(self, turn_ids: Sequence[int]) -> Sequence[int]: ...


def argument_logprobs(chat: Arguments, environment: Environment, turn: Written) -> list[float]:
    """Log-probabilities of the tokens of a turn's argument (`Chat.argument_tokens`) that the policy drew, without those that a
    decoder forced: for `stages.environments.protocol.tell_logprobs`. [] for environments that are not told any."""
    if not hasattr(environment, "drawn"):
        return []
    places = chat.argument_tokens(turn.token_ids)
    return [turn.logprobs[place] for place in places if not turn.owners or turn.owners[place] != Owner.FORCED]
