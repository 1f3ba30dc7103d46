"""Models that differ in their adapters alone, in one engine: a session computes with the weights that it was opened with.

Such models share the base's weights, the slots and the key/value cache. Rows with other adapters go through passes of their own,
so that a session's tokens are the same bits as in an engine of its model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stages.engine.engine import Pause, Sampling, Turn

if TYPE_CHECKING:
    from stages.engine.slots import Prefix
    from stages.engine.torch_engine import TorchEngine

FACTORS = ".lora_"
"""In the names of the parameters that peft's adapters add."""


def share_base(first: Any, second: Any) -> bool:
    """Whether two models have the same layers with the same weights in memory, apart from the factors of their adapters."""
    own, other = (dict(model.named_parameters()) for model in (first, second))
    return own.keys() == other.keys() and all(own[name] is other[name] for name in own if FACTORS not in name)


class AdapterView:
    """An `Engine` that plays model `adapter` of `engine` (see `TorchEngine.beside`). `advance` returns the finished turns of all
    models' sessions, so that only one model's should be in the middle of a turn."""

    def __init__(self, engine: TorchEngine, adapter: int) -> None:
        self.engine, self.adapter = engine, adapter

    @property
    def counters(self) -> dict[str, int]:
        """Those of the engine."""
        return self.engine.counters

    def open(self, token_ids: Sequence[int], prefix: Prefix | None = None) -> int:
        """See `TorchEngine.open`."""
        return self.engine.open(token_ids, prefix, self.adapter)

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        self.engine.extend(session, token_ids)

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        self.engine.request(session, key, sampling)

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        return self.engine.advance(pause)

    def snapshot(self, session: int, length: int | None = None) -> Prefix:
        return self.engine.snapshot(session, length)

    def fork(self, session: int, count: int) -> list[int]:
        return self.engine.fork(session, count)

    def close(self, session: int) -> None:
        self.engine.close(session)
