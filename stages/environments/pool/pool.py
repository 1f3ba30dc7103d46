"""Asks the members of a pool."""

from __future__ import annotations

from collections.abc import Sequence

from stages.environments.pool.reply import NONE, Backend, Reply
from stages.environments.pool.settings import Member


class Pool:
    """Members that answer by themselves. Retrievers search the task's own pages, which the environment has.

    members: all of them, of which an environment offers those of the task's split.
    """

    def __init__(self, members: Sequence[Member], max_reply_tokens: int) -> None:
        self.members = tuple(members)
        self._longest = max_reply_tokens
        self._backends: dict[str, Backend] = {}
        self._asked: dict[tuple[str, str], Reply] = {}

    def offered(self, split: str) -> dict[str, Member]:
        """The members in tasks of this split, by name."""
        return {member.name: member for member in self.members if split == "test" or not member.new}

    def ask(self, member: Member, question: str) -> Reply:
        """The reply of a model or a server, always the same for the same question. Raises RuntimeError if a server is gone, and
        ValueError for a folder that is no model."""
        key = member.name, question
        if key not in self._asked:
            self._asked[key] = self._backend(member).ask(question)
        return self._asked[key]

    def _backend(self, member: Member) -> Backend:
        if member.name not in self._backends:
            if member.model is not None:
                from stages.environments.pool.local_model import LocalModelBackend

                self._backends[member.name] = LocalModelBackend(member.model, self._longest)
            elif member.server is not None:
                from stages.environments.pool.server import ServerBackend

                self._backends[member.name] = ServerBackend(member.name, member.server, self._longest)
            else:
                raise ValueError(f"member {member.name} is a retriever, which the environment asks")
        return self._backends[member.name]

    def cut(self, text: str) -> Reply:
        """A retriever's reply: at most the pool's longest number of words; None without any."""
        words = text.split()[: self._longest]
        return Reply(" ".join(words) or NONE, len(words))
