"""Assigns sessions to rows of the key/value cache (slots) and keeps the state of each row's running turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from stages.engine.cache import SlotCache
from stages.engine.engine import Sampling, Turn
from stages.engine.masks import TokenMask, owners_of

if TYPE_CHECKING:
    from stages.engine.drawing import Drawn

ROWS, LEAST_ROWS = 4, 16
"""Forward passes have a multiple of ROWS rows, and at least LEAST_ROWS: a CPU's matrix products of fewer may use kernels of their
own, whose sums differ in the last bits, so that a row's result would depend on how many others there are."""


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def padded(rows: int) -> int:
    """The number of rows of a pass for `rows` of them."""
    return max(round_up(rows, ROWS), LEAST_ROWS)


@dataclass(frozen=True)
class Prefix:
    """A session's tokens and the computed part of its cache, [layers, 2, kv_heads, cached, head_dim] or None."""

    token_ids: tuple[int, ...]
    cache: Tensor | None
    state: Tensor | None = None
    """The hidden state after the last token, if known: the next turn then starts without a forward pass."""
    adapter: int = 0
    """Which weights the cache and the state are of; see `TorchEngine.beside`."""

    @property
    def cached(self) -> int:
        return 0 if self.cache is None else int(self.cache.shape[3])


class Session:
    """A growing token sequence. The first `cached` of `tokens` are in the cache: in row `slot`, or in `prefix` if that is -1.

    `sampling` is None between turns. While a turn runs, its tokens are in the `SlotTable`, not yet in `tokens`. `state`: the
    hidden state [D] after the last token, if `TorchEngine.read` computed it. `adapter`: the weights that it computes with, 0 for
    those that the engine was made with.
    """

    __slots__ = ("adapter", "cached", "id", "idle_since", "key", "prefix", "room_ends", "sampling", "slot", "state", "tokens")

    def __init__(self, number: int, tokens: list[int], prefix: Tensor | None, cached: int, adapter: int = 0) -> None:
        self.id, self.tokens, self.prefix, self.cached, self.adapter = number, tokens, prefix, cached, adapter
        self.slot = -1
        self.idle_since = 0
        self.key = 0
        self.sampling: Sampling | None = None
        self.room_ends = False
        self.state: Tensor | None = None


def pending(session: Session) -> list[int]:
    """Tokens not fed yet."""
    return session.tokens[session.cached :]


class SlotTable:
    """State per row of the cache. Sessions use the first `slots` rows, which are `padded`.

    `active` (decoding now), `position` (of the next fed token), `last` (token to feed next), `count` (tokens drawn in this turn),
    `limit` (maximum of `count`), `key`, `adapter` and the sampling settings; `drawn`, `logprob`, `entropy`, `left`, `forced`
    [rows, max_length] and `kept`, a list of sets per row: the turn so far. `mask`: per row, None where all tokens may come.
    """

    def __init__(self, cache: SlotCache, slots: int, max_length: int) -> None:
        self.cache, self.slots = cache, slots
        rows = cache.slots
        self.active = np.zeros(rows, dtype=bool)
        self.position = np.zeros(rows, dtype=np.int64)
        self.last = np.zeros(rows, dtype=np.int64)
        self.count = np.zeros(rows, dtype=np.int64)
        self.limit = np.ones(rows, dtype=np.int64)
        self.key = np.zeros(rows, dtype=np.uint64)
        self.adapter = np.zeros(rows, dtype=np.int64)
        self.temperature = np.ones(rows)
        self.top_p = np.ones(rows)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.candidates = np.zeros(rows, dtype=np.int64)
        self.keep = np.zeros(rows, dtype=bool)
        self.drawn = np.zeros((rows, max_length), dtype=np.int64)
        self.logprob = np.zeros((rows, max_length), dtype=np.float32)
        self.entropy = np.zeros((rows, max_length), dtype=np.float32)
        self.left = np.zeros((rows, max_length))
        self.forced = np.zeros((rows, max_length), dtype=bool)
        self.kept: list[list[np.ndarray]] = [[] for _ in range(rows)]
        self.mask: list[TokenMask | None] = [None] * rows
        self.holder: list[Session | None] = [None] * rows
        self.evictions = 0
        self._per_row = [
            *(self.active, self.position, self.last, self.count, self.limit, self.key),
            *(self.temperature, self.top_p, self.top_k, self.candidates, self.keep, self.drawn, self.logprob, self.entropy),
            *(self.left, self.forced, self.adapter),
        ]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A forward pass that fails within may leave NaN in the cache, behind what is known of each row: that is cleared, also in
        rows that no session holds, since later passes compute them as padding. Masked positions get weight 0, and 0 times NaN is
        still NaN."""
        try:
            yield
        except BaseException:
            for row, known in enumerate([*self.position.tolist(), 0]):
                self.cache.clear(row, known)
            raise

    @property
    def vacant(self) -> int:
        return self.holder[: self.slots].count(None)

    def begin(self, session: Session, room: int) -> None:
        """Set up a turn of a session in a slot with room for `room` more tokens."""
        sampling, slot = session.sampling, session.slot
        assert sampling is not None
        session.room_ends = room <= sampling.max_tokens
        self.limit[slot] = min(room, sampling.max_tokens)
        self.count[slot] = 0
        self.key[slot], self.adapter[slot] = session.key, session.adapter
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.candidates[slot] = sampling.candidates
        masked = sampling.mask is not None and sampling.mask.renormalise
        self.keep[slot] = sampling.kept and (sampling.restricted or masked)
        self.kept[slot], self.mask[slot] = [], sampling.mask

    def record(self, slots: np.ndarray, drawn: Drawn, places: np.ndarray) -> None:
        """Record the tokens of rows `slots`, found at `places` of `drawn`, as the next ones of their turns."""
        ids, count = drawn.ids[places], self.count[slots]
        self.last[slots] = ids
        self.drawn[slots, count] = ids
        self.logprob[slots, count] = drawn.logprobs[places]
        if drawn.entropies is not None:
            self.entropy[slots, count] = drawn.entropies[places]
        if drawn.left is not None and drawn.forced is not None:
            self.left[slots, count], self.forced[slots, count] = drawn.left[places], drawn.forced[places]
        for slot, place, token in zip(slots, places, ids.tolist(), strict=True):
            if drawn.kept is not None and self.keep[slot]:
                self.kept[slot].append(drawn.kept[place])
            if (mask := self.mask[slot]) is not None:
                mask.append(token)

    def turn(self, session: Session, reason: str) -> Turn:
        """The finished turn of a session in a slot."""
        slot = session.slot
        number, mask = int(self.count[slot]), self.mask[slot]
        self.mask[slot] = None
        entropy = self.entropy[slot, :number].tolist() if self.candidates[slot] else ()
        tokens, logs = self.drawn[slot, :number].tolist(), self.logprob[slot, :number].tolist()
        kept = tuple(tuple(tokens.tolist()) for tokens in self.kept[slot])
        owners: tuple[int, ...] = ()
        left: tuple[float, ...] = ()
        if mask is not None:
            left = tuple(self.left[slot, :number].tolist())
            owners = owners_of(self.forced[slot, :number].tolist(), mask)
        return Turn(session.id, tuple(tokens), tuple(logs), reason, tuple(entropy), kept, owners, left)

    def vacate(self, session: Session) -> None:
        """Free the session's slot; its cache is lost."""
        self.active[session.slot] = False
        self.mask[session.slot] = None
        self.position[session.slot] = 0
        self.holder[session.slot] = None
        session.slot = -1

    def place(self, session: Session) -> bool:
        """Give the session a free slot, or that of the longest-idle session, whose cache moves to host memory. False if every
        slot is in use."""
        if session.slot >= 0:
            return True
        free = next((slot for slot in range(self.slots) if self.holder[slot] is None), -1)
        if free < 0:
            idle = [holder for holder in self.holder if holder is not None and holder.sampling is None]
            if not idle:
                return False
            evicted = min(idle, key=lambda holder: (holder.idle_since, holder.id))
            free = evicted.slot
            evicted.prefix = self.cache.copy_out(free, evicted.cached).cpu() if evicted.cached else None
            self.vacate(evicted)
            self.evictions += 1
        if session.prefix is not None:
            self.cache.copy_in(free, session.prefix)
            session.prefix = None
        session.slot = free
        self.holder[free] = session
        self.position[free] = session.cached
        return True

    def swap(self, first: int, second: int) -> None:
        """Exchange two rows of the cache with all their state."""
        sessions = self.holder[first], self.holder[second]
        saved = self.cache.copy_out(second, int(self.position[second])) if sessions[1] is not None else None
        self.cache.move(first, second, int(self.position[first]))
        if saved is not None:
            self.cache.copy_in(first, saved)
        for values in self._per_row:
            values[[first, second]] = values[[second, first]]
        self.kept[first], self.kept[second] = self.kept[second], self.kept[first]
        self.mask[first], self.mask[second] = self.mask[second], self.mask[first]
        self.holder[second], self.holder[first] = sessions
        for slot, session in zip((second, first), sessions, strict=True):
            if session is not None:
                session.slot = slot

    def compact(self) -> None:
        """Move active rows from the end into holes at the front if that makes the batch clearly smaller."""
        slots = np.flatnonzero(self.active)
        width = padded(len(slots))
        if not len(slots) or padded(int(slots[-1]) + 1) <= width + max(ROWS, width // 4):
            return
        holes = [slot for slot in range(min(width, self.slots)) if not self.active[slot]]
        for source, target in zip([int(slot) for slot in slots if slot >= width], holes, strict=False):
            self.swap(source, target)
