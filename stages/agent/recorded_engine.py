"""An engine without a model: it says turns that were sampled before, so that they are played as ordinary episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stages.engine.engine import Pause, Sampling, Turn


class RecordedEngine:
    """An `Engine` that answers a request with the turn recorded under its key. `request` raises ValueError for an unknown key:
    the environment responds otherwise than when the turns were recorded."""

    def __init__(self, turns: Mapping[int, Turn]) -> None:
        self._turns = turns
        self._asked: list[Turn] = []
        self._open: set[int] = set()
        self._opened = 0

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        self._opened += 1
        self._open.add(self._opened)
        return self._opened

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        self._check(session)

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        self._check(session)
        if key not in self._turns:
            raise ValueError("an episode goes on after its recorded turns: its environment does not repeat its answers")
        self._asked.append(replace(self._turns[key], session=session))

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        asked, self._asked = sorted(self._asked, key=lambda turn: turn.session), []
        return asked

    def snapshot(self, session: int, length: int | None = None) -> Any:
        self._check(session)
        return ()

    def fork(self, session: int, count: int) -> list[int]:
        self._check(session)
        return [self.open(()) for _ in range(count)]

    def close(self, session: int) -> None:
        self._open.remove(session)

    @property
    def counters(self) -> dict[str, int]:
        return {"sampled_tokens": 0, "fed_tokens": 0, "forked_tokens": 0}

    def _check(self, session: int) -> None:
        if session not in self._open:
            raise KeyError(session)
