"""What a member of a pool answers, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stages.environments.pool.settings import Member

NONE = "None"
"""The reply of a member that has nothing to say, as in Router-R1."""


@dataclass(frozen=True)
class Reply:
    """What a member answers, on one line; `tokens`: its length, which is paid for."""

    text: str
    tokens: int


class Backend(Protocol):
    def ask(self, question: str) -> Reply: ...


def cost(reply: Reply, member: Member) -> float:
    """What a call costs, in millionths of the currency of the prices (Router-R1, section on cost rewards)."""
    return reply.tokens * member.price
