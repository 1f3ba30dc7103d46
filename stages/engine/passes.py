"""Builds the decoder's forward passes: which rows attend together, what each new token attends to, and where it is stored.

A layer with a sliding window reads only the visible columns of the cache, rounded up to blocks. Rows whose windows are far apart
are gathered, each from its own first column; otherwise one contiguous range is read without a copy. Either way a row starts at a
multiple of a block, so that on a CPU its sums do not depend on other rows, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stages.engine.cache import SUM_BLOCK, SlotCache, View
from stages.engine.forward import Part, Pass
from stages.engine.slots import LEAST_ROWS, ROWS, Session, padded, round_up

QUERY_STEP = 8
"""Fed tokens per row are padded to a multiple of this."""
LENGTH_STEP = 32
"""Attention reads the cache up to a multiple of this."""
ROW_STEP_GPU, LENGTH_STEP_GPU = 32, 128
"""The same steps for rows and lengths of decoding passes on a GPU."""
GROUP_COST, GROUP_COST_GPU = 1 << 12, 1 << 19
"""Attention in one more group costs about as much as this many scores of a row's new token at a position."""
GATHER_COST = 2
"""Reading this many times as many columns contiguously costs about as much as gathering."""


class PassBuilder:
    """Builds the passes over `cache` for a model that computes in `dtype`."""

    def __init__(self, cache: SlotCache, dtype: torch.dtype) -> None:
        self.cache, self.device = cache, cache.data.device
        # A GPU records a CUDA graph for each shape, so fewer, larger shapes are better there.
        self._cpu = self.device.type == "cpu"
        self.row_step, self._length_step = (ROWS, LENGTH_STEP) if self._cpu else (ROW_STEP_GPU, LENGTH_STEP_GPU)
        self._group_cost = GROUP_COST if self._cpu else GROUP_COST_GPU
        self._block = SUM_BLOCK if self._cpu else 1
        self._columns = torch.arange(cache.capacity, device=self.device)
        self._low = torch.tensor(torch.finfo(dtype).min, dtype=dtype, device=self.device)
        self._zero = torch.zeros((), dtype=dtype, device=self.device)

    def to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def decoding(self, ids: np.ndarray, positions: np.ndarray, active: np.ndarray) -> Pass:
        """A pass with one token `ids` [N] at `positions` [N] for each of the first N rows. Inactive rows write to the spare row,
        since their own may hold sessions."""
        count = len(ids)
        rows, at = np.where(active, np.arange(count), self.cache.slots), np.where(active, positions, 0)
        views = self._views(slice(0, count), at, at + 1, 1, active)
        return Pass(self.to_device(ids), self.to_device(rows), self.to_device(at), [Part(slice(0, count), views, 0, count)])

    def groups(self, sessions: Sequence[Session], sizes: dict[int, int]) -> list[list[Session]]:
        """Divide sessions with `sizes[id]` pending tokens into those that attend together, each group sorted by slot.

        All rows of a group are padded to its largest number of new tokens and its longest sequence, so sessions of similar size
        go together: of all divisions of the sessions sorted by new tokens, then by length, the cheapest.
        """
        sized = [
            (round_up(sizes[session.id], QUERY_STEP), round_up(session.cached + sizes[session.id], self._length_step), session)
            for session in sessions
        ]
        sized.sort(key=lambda row: (-row[0], -row[1], row[2].id))
        costs: list[float] = [0]
        starts: list[int] = []
        for end in range(1, len(sized) + 1):
            cost, chosen, length = math.inf, 0, 0
            for start in range(end - 1, -1, -1):
                width, longest, _ = sized[start]
                length = max(length, longest)
                own = (end - start) * width * length + self._group_cost
                if own >= cost:
                    break  # a larger group costs even more
                if costs[start] + own < cost:
                    cost, chosen = costs[start] + own, start
            costs.append(cost)
            starts.append(chosen)
        found, end = [], len(sized)
        while end:
            start = starts[end - 1]
            found.append(sorted((session for _, _, session in sized[start:end]), key=lambda session: session.slot))
            end = start
        return found[::-1]

    def feeding(self, groups: Sequence[Sequence[Session]], sizes: dict[int, int]) -> tuple[Pass, int]:
        """A pass with `sizes[id]` pending tokens of each session, where each group attends together; also the token count."""
        counts = [np.array([sizes[session.id] for session in group]) for group in groups]
        starts = np.cumsum([0, *(int(number.sum()) for number in counts)]).tolist()
        made = [self._part(*arguments) for arguments in zip(groups, counts, starts, strict=False)]
        ids = [
            token
            for group in groups
            for session in group
            for token in session.tokens[session.cached : session.cached + sizes[session.id]]
        ]
        ends = np.cumsum(np.concatenate(counts)) - 1
        # Padding goes to the cache's spare row.
        fill = padded(len(ids)) - len(ids)
        batch = Pass(
            self.to_device(np.array(ids + [0] * fill)),
            self.to_device(np.concatenate([*(rows for _, rows, _ in made), np.full(fill, self.cache.slots)])),
            self.to_device(np.concatenate([*(positions for _, _, positions in made), np.zeros(fill, dtype=np.int64)])),
            [part for part, _, _ in made],
            self.to_device(np.concatenate([ends, np.repeat(ends[:1], padded(len(ends)) - len(ends))])),
        )
        return batch, len(ids)

    def _part(self, group: Sequence[Session], counts: np.ndarray, start: int) -> tuple[Part, np.ndarray, np.ndarray]:
        """The part of sessions that attend together, with `counts` [n] new tokens each, from index `start` of the pass; also the
        tokens' rows and positions."""
        slots = np.array([session.slot for session in group])
        first = np.array([session.cached for session in group])
        # At least LEAST_ROWS with padding, since a model's own layers compute padded tokens too.
        width = round_up(max(int(counts.max()), LEAST_ROWS // len(group)), QUERY_STEP)
        row = np.repeat(np.arange(len(group)), counts)
        column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        together = bool((np.diff(slots) == 1).all())
        rows = slice(int(slots[0]), int(slots[-1]) + 1) if together else self.to_device(slots)
        views = self._views(rows, first, first + counts, width, np.ones(len(group), dtype=bool))
        part = Part(rows, views, start, start + len(row), self.to_device(row * width + column))
        return part, slots[row], first[row] + column

    def _views(
        self, rows: Tensor | slice, first: np.ndarray, end: np.ndarray, width: int, active: np.ndarray
    ) -> tuple[View, ...]:
        """Views for layers of each kind, for rows with new tokens at positions `first` to `end` [n], padded to `width`. Inactive
        rows are ignored."""
        positions = self.to_device(first[:, None] + np.arange(width))
        length = min(round_up(int(end[active].max()), self._length_step), self.cache.capacity)
        full: View | None = None
        views = []
        for window in self.cache.kinds:
            if window is None or int(end[active].max()) <= window:
                full = full or View(self._mask(positions, self._columns[:length]))
                views.append(full)
            else:
                views.append(self._window(rows, window, positions, first, end, active))
        return tuple(views)

    def _window(
        self, rows: Tensor | slice, window: int, positions: Tensor, first: np.ndarray, end: np.ndarray, active: np.ndarray
    ) -> View:
        """The view for layers where a token attends to `window` positions, its own included."""
        starts = np.where(active, np.maximum(first - window + 1, 0) // self._block * self._block, 0)
        own = round_up(int((end - starts)[active].max()), self._length_step)
        start = int(starts[active].min())
        length = min(round_up(int(end[active].max()), self._length_step), self.cache.capacity) - start
        if self._cpu and length <= (GATHER_COST * own if isinstance(rows, slice) else own):
            return View(self._mask(positions, self._columns[start : start + length], window), start)
        begins = self.to_device(starts)
        columns = begins[:, None, None, None] + torch.arange(own, device=self.device)
        return View(self._mask(positions, columns, window), 0, self.cache.places(rows, begins, own))

    def _mask(self, positions: Tensor, columns: Tensor, window: int | None = None) -> Tensor:
        """Additive mask [N, 1, Q, length] for tokens at positions [N, Q]: of `columns` ([length], or one set per row) each token
        attends to those up to its own position, at most the last `window`."""
        at = positions[:, None, :, None]
        hidden = columns > at if window is None else (columns > at) | (columns <= at - window)
        return torch.where(hidden, self._low, self._zero)
