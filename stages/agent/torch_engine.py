"""The default generation engine: continuous batching over slots with PyTorch and the Hugging Face model itself.

A session that was asked for a turn holds a slot (one row of the key/value cache). Its new tokens are fed in padded groups, then
all active rows decode together, one token per forward pass; rows that finish leave, waiting sessions enter. A session keeps its
slot between turns, so that only its new observation is fed, until another needs the slot: then the cache of the longest-idle
session moves out (to be copied back at its next turn).

What a session samples does not depend on its neighbours, bit for bit on a CPU: random numbers are counter-based, every pass has
a multiple of 4 rows (below that the matrix kernels sum in another order), and what a session feeds goes through the same kind
of pass whoever else is there. On a GPU the kernels give no such promise; there it holds up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages import seeding
from stages.agent.cache import SlotCache
from stages.agent.decoder import Part, Pass, make_forward
from stages.agent.engine import Pause, Sampling, Turn
from stages.agent.sampling import candidate_entropy, draw
from stages.agent.slots import ROWS, Prefix, Session, SlotTable, pending, round_up

QUERY_STEP = 8
"""Fed tokens per row are padded to a multiple of this."""
LENGTH_STEP = 32
"""Attention reads the cache up to a multiple of this."""
ROW_STEP_GPU, LENGTH_STEP_GPU = 32, 128
"""On a GPU, decoding passes have a multiple of this many rows and read the cache up to a multiple of this."""
CHUNK = 256
"""Most tokens fed per row in one pass."""
PASS_TOKENS = 4096
"""Most tokens fed in one pass, each row's rounded up."""
READING = Sampling()
"""Stands for a turn in sessions that are read."""
Drawn = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Tokens [N], their log-probabilities [N] and, where a row wants them, entropies [N]."""
WIDER = 1.5
"""Rows attend together while the one with most new tokens has at most about this many times those of the others."""


class TorchEngine:
    """`stages.agent.engine.Engine` over a Hugging Face causal LM with full attention in every layer.

    model: put in evaluation mode by the engine; end_of_turn: tokens that end a turn; slots: sessions that decode at once;
    max_length: longest session in tokens; batch_share: `advance` returns when this share of the running turns is finished, which
    saves passes for feeding (the answers are the same). Raises ValueError for an architecture that it can't serve.
    """

    def __init__(
        self, model: Any, end_of_turn: Iterable[int], slots: int = 64, max_length: int = 640, batch_share: float = 0.25
    ) -> None:
        config = model.config
        self._refuse(config, max_length)
        self.model, self.slots, self.max_length = model, slots, max_length
        self.batch_share = batch_share
        self.device = model.device
        self._head = model.get_output_embeddings()
        self._stop = np.array(sorted(set(end_of_turn)), dtype=np.int64)
        rows = round_up(slots, ROWS)
        heads = config.num_attention_heads
        self.cache = SlotCache(
            config.num_hidden_layers,
            rows,
            getattr(config, "num_key_value_heads", None) or heads,
            round_up(max_length, LENGTH_STEP),
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            model.dtype,
            self.device,
        )
        self._layers = make_forward(model, self.cache)
        # A GPU records a pass for each shape (see graphs); there, few shapes are worth more than small ones.
        self._row_step, self._length_step = (ROWS, LENGTH_STEP) if self.device.type == "cpu" else (ROW_STEP_GPU, LENGTH_STEP_GPU)
        self._columns = torch.arange(self.cache.capacity, device=self.device)
        self._low = torch.tensor(torch.finfo(model.dtype).min, dtype=model.dtype, device=self.device)
        self._zero = torch.zeros((), dtype=model.dtype, device=self.device)
        self._row_index = torch.arange(rows, device=self.device)
        self.table = SlotTable(self.cache, slots, max_length)
        self._sessions: dict[int, Session] = {}
        self._queue: list[Session] = []
        self._next_id = 0
        self._clock = 0
        self._counters = {"sampled_tokens": 0, "fed_tokens": 0, "forward_passes": 0, "forked_tokens": 0}

    @staticmethod
    def _refuse(config: Any, max_length: int) -> None:
        kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"})
        window = getattr(config, "sliding_window", None) or math.inf
        if kinds and not (kinds == ["sliding_attention"] and window >= max_length):
            raise ValueError(
                f"the torch engine serves models with full attention only; {config.model_type} has layers of {kinds}"
            )
        limit = getattr(config, "max_position_embeddings", None) or math.inf
        if max_length > limit:
            raise ValueError(
                f"model.max_length is {max_length}, but the model's max_position_embeddings is {limit}; lower the former"
            )

    # ---- the protocol -------------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        return {**self._counters, "evictions": self.table.evictions}

    def open(self, token_ids: Sequence[int], prefix: Prefix | None = None) -> int:
        """A new session; see `Engine.open`. Raises ValueError if it would be empty or longer than max_length."""
        tokens = [*(prefix.token_ids if prefix else ()), *token_ids]
        if not tokens or len(tokens) > self.max_length:
            raise ValueError(f"a session of {len(tokens)} tokens; it needs at least 1 and at most max_length = {self.max_length}")
        if not self._sessions:
            self._layers.refresh()
        session = Session(self._next_id, tokens, prefix.cache if prefix else None, prefix.cached if prefix else 0)
        if prefix and not token_ids:
            session.state = prefix.state
        self._next_id += 1
        self._sessions[session.id] = session
        self._counters["forked_tokens"] += session.cached
        return session.id

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        """See `Engine.extend`. Raises ValueError if the session would be longer than max_length."""
        state = self._idle(session)
        if len(state.tokens) + len(token_ids) > self.max_length:
            raise ValueError(
                f"session {session} has {len(state.tokens)} tokens; {len(token_ids)} more pass max_length = {self.max_length}"
            )
        state.tokens.extend(token_ids)
        if token_ids:
            state.state = None

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        state = self._idle(session)
        state.key, state.sampling = key, sampling
        self._queue.append(state)

    def room(self, session: int) -> int:
        """Tokens that still fit into the session."""
        return self.max_length - len(self._sessions[session].tokens)

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        self._clock += 1
        if self.model.training:
            self.model.eval()
        with torch.inference_mode():
            turns = self._start()
            running = len(turns) + int(self.table.active.sum())
            wanted = max(1, math.ceil(running * self.batch_share))
            while len(turns) < wanted and self.table.active.any() and not (pause and pause()):
                turns += self._step()
        return sorted(turns, key=lambda turn: turn.session)

    def snapshot(self, session: int, length: int | None = None) -> Prefix:
        """See `Engine.snapshot`. Runs no pass: tokens not fed yet are in the copy as tokens."""
        state = self._idle(session)
        if length is not None and not 0 < length <= len(state.tokens):
            raise ValueError(f"session {session} has {len(state.tokens)} tokens; a copy of its first {length} is not to be had")
        cached = state.cached
        if length is not None and length < len(state.tokens):
            cached = min(cached, length - 1)  # the last token is fed again, since the next draw needs what comes out of it
        if not cached:
            return Prefix(tuple(state.tokens[:length]), None)
        held = state.prefix[:, :, :, :cached] if state.prefix is not None else self.cache.copy_out(state.slot, cached)
        return Prefix(tuple(state.tokens[:length]), held, state.state if cached == len(state.tokens) else None)

    def read(self, sessions: Sequence[int]) -> list[np.ndarray]:
        """What the model makes of idle sessions: the hidden state after each one's last token, [D] float32 each.

        Tokens not fed yet are fed in as few passes as slots allow. A turn asked for next, or from a `snapshot`, is drawn from the
        same pass. Sessions that were read without a token since are not fed again.
        """
        waiting = [self._idle(session) for session in sessions]
        with torch.inference_mode():
            if self.model.training:
                self.model.eval()
            while waiting := [session for session in waiting if session.state is None]:
                self._read(waiting)
        states = [self._sessions[session].state for session in sessions]
        return [state.float().cpu().numpy() for state in states if state is not None]

    def _read(self, sessions: list[Session]) -> None:
        """Read those of the sessions that get a slot together."""
        placed = []
        for session in sessions:
            if not self.table.place(session):
                break
            session.sampling = READING  # so that the others do not take its slot
            placed.append(session)
        if not placed:
            raise RuntimeError("no slot is free to read with: all of them are in the middle of a turn; advance() first")
        for session in placed:
            session.sampling = None
            if session.cached == len(session.tokens):  # its last token is fed again, for what comes out of it
                session.cached -= 1
                self.table.position[session.slot] = session.cached
        for number, state in self._feed(placed, keep=0).items():
            self._sessions[number].state = state

    def fork(self, session: int, count: int) -> list[int]:
        """See `Engine.fork`. What is not in the cache yet is fed first (all but the last token), for every idle session that has
        such tokens, in one go: so open all prompts, then fork each."""
        if len(pending(self._idle(session))) > 1:
            self._fill(session)
        prefix = self.snapshot(session)
        return [self.open((), prefix) for _ in range(count)]

    def close(self, session: int) -> None:
        state = self._sessions.pop(session)
        if state in self._queue:
            self._queue.remove(state)
        if state.slot >= 0:
            self.table.vacate(state)

    def reset(self) -> None:
        """Close every session. Weights may change while none is open; caches and snapshots belong to the old ones."""
        for session in sorted(self._sessions):
            self.close(session)

    def _idle(self, session: int) -> Session:
        state = self._sessions[session]
        if state.sampling is not None:
            raise RuntimeError(f"session {session} is in the middle of a turn; wait until advance() returns it")
        return state

    # ---- forward passes -----------------------------------------------------------------------------------------------------

    def _forward(self, batch: Pass) -> Tensor:
        """Hidden states [n, D] of the tokens that the pass wants."""
        self._counters["forward_passes"] += 1
        return self._layers(batch)

    def _mask(self, positions: Tensor, length: int) -> Tensor:
        """Additive mask [N, 1, Q, length] of tokens at positions [N, Q]: each sees positions up to its own."""
        return torch.where(self._columns[:length] > positions[:, None, :, None], self._low, self._zero)

    def _length(self, longest: int) -> int:
        """How far attention reads for rows of at most `longest` tokens."""
        return min(round_up(longest, self._length_step), self.cache.capacity)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _part(self, group: Sequence[Session], counts: np.ndarray, start: int) -> tuple[Part, np.ndarray, np.ndarray]:
        """Sessions that attend together, with `counts` [n] new tokens each; also the tokens' rows and positions. The tokens come
        from place `start` on in the pass."""
        slots = np.array([session.slot for session in group])
        first = np.array([session.cached for session in group])
        width = round_up(int(counts.max()), QUERY_STEP)
        row = np.repeat(np.arange(len(group)), counts)
        column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        together = bool((np.diff(slots) == 1).all())
        rows = slice(int(slots[0]), int(slots[-1]) + 1) if together else self._to_device(slots)
        mask = self._mask(self._to_device(first[:, None] + np.arange(width)), self._length(int((first + counts).max())))
        part = Part(rows, mask, start, start + len(row), self._to_device(row * width + column))
        return part, slots[row], first[row] + column

    def _feed_pass(self, groups: list[list[Session]], sizes: dict[int, int]) -> Tensor:
        """Feed `sizes[id]` pending tokens of each session in one pass; hidden states [n, D] of the last ones, in order."""
        counts = [np.array([sizes[session.id] for session in group]) for group in groups]
        starts = np.cumsum([0, *(int(number.sum()) for number in counts)]).tolist()
        made = [self._part(*arguments) for arguments in zip(groups, counts, starts, strict=False)]
        ids: list[int] = []
        for session in (session for group in groups for session in group):
            ids += session.tokens[session.cached : session.cached + sizes[session.id]]
            session.cached += sizes[session.id]
            self.table.position[session.slot] = session.cached
        ends = np.cumsum(np.concatenate(counts)) - 1
        # Up to a whole group of 4, which the cache's spare row takes.
        fill = -len(ids) % ROWS
        batch = Pass(
            self._to_device(np.array(ids + [0] * fill)),
            self._to_device(np.concatenate([*(rows for _, rows, _ in made), np.full(fill, self.cache.slots)])),
            self._to_device(np.concatenate([*(positions for _, _, positions in made), np.zeros(fill, dtype=np.int64)])),
            [part for part, _, _ in made],
            self._to_device(np.concatenate([ends, np.repeat(ends[:1], -len(ends) % ROWS)])),
        )
        self._counters["fed_tokens"] += len(ids)
        return self._forward(batch)

    def _feed(self, sessions: list[Session], keep: int) -> dict[int, Tensor]:
        """Feed the pending tokens of sessions that hold slots, all but the last `keep`; hidden state [D] after them, by id."""
        after: dict[int, Tensor] = {}
        left = [session for session in sessions if len(session.tokens) - keep > session.cached]
        while left:
            sizes = {session.id: min(len(session.tokens) - keep - session.cached, CHUNK) for session in left}
            left.sort(key=lambda session: (-sizes[session.id], session.id))
            chosen: list[Session] = []
            tokens = 0
            for session in left:
                tokens += round_up(sizes[session.id], QUERY_STEP)
                if chosen and tokens > PASS_TOKENS:
                    break
                chosen.append(session)
            # Those whose attention would be mostly padding attend apart.
            groups: list[list[Session]] = []
            for session in chosen:
                if not groups or sizes[groups[-1][0].id] > WIDER * sizes[session.id] + QUERY_STEP:
                    groups.append([])
                groups[-1].append(session)
            groups = [sorted(group, key=lambda session: session.slot) for group in groups]
            hidden = self._feed_pass(groups, sizes)
            after.update(zip((session.id for group in groups for session in group), hidden, strict=False))
            left = [session for session in left if len(session.tokens) - keep > session.cached]
        return after

    def _fill(self, first: int) -> None:
        """Feed session `first`, and the other idle ones that hold or can have a free slot, up to their last token."""
        with torch.inference_mode():
            if not self.table.place(self._sessions[first]):
                return
            chosen = [self._sessions[first]]
            for session in self._sessions.values():
                behind = session.sampling is None and len(pending(session)) > 1
                if behind and session is not chosen[0] and (session.slot >= 0 or self.table.vacant):
                    self.table.place(session)
                    chosen.append(session)
            self._feed(chosen, keep=1)

    # ---- turns --------------------------------------------------------------------------------------------------------------

    def _start(self) -> list[Turn]:
        """Let waiting sessions in, feed what they have not fed and draw their first tokens; turns that this already finishes."""
        turns, entering, waiting = [], [], []
        for session in self._queue:
            assert session.sampling is not None
            room = self.max_length - len(session.tokens)
            if room < 1:
                session.sampling = None
                turns.append(Turn(session.id, (), (), "context"))
            elif self.table.place(session):
                entering.append(session)
                self.table.begin(session, room)
            else:
                waiting.append(session)
        self._queue = waiting
        if not entering:
            return turns
        read = {session.id: session.state for session in entering if session.state is not None}
        hidden = {**read, **self._feed(entering, keep=0)}
        states = torch.stack([hidden[session.id] for session in entering])
        for session in entering:
            session.state = None
        slots = np.array([session.slot for session in entering], dtype=np.int64)
        padded = np.concatenate([slots, np.repeat(slots[:1], -len(slots) % ROWS)])
        states = torch.cat([states, states[:1].expand(len(padded) - len(slots), -1)])
        self.table.active[slots] = True
        turns += self._take(slots, self._draw(states, padded), np.arange(len(slots)))
        self.table.compact()
        return turns

    def _draw(self, hidden: Tensor, rows: np.ndarray | slice) -> Drawn:
        """What cache rows `rows` draw after hidden states [N, D]."""
        logits = self._head(hidden)
        uniforms = seeding.uniform(self.table.key[rows], self.table.count[rows])
        ids, logprobs = draw(
            logits,
            self._to_device(self.table.temperature[rows]),
            self._to_device(self.table.top_p[rows]),
            self._to_device(self.table.top_k[rows]),
            self._to_device(uniforms),
        )
        entropies = None
        if (candidates := self.table.candidates[rows]).any():
            temperature = self._to_device(self.table.temperature[rows])
            entropies = candidate_entropy(logits, temperature, self._to_device(candidates)).cpu().numpy()
        return ids.cpu().numpy(), logprobs.cpu().numpy(), entropies

    def _step(self) -> list[Turn]:
        """One token for every active row."""
        slots = np.flatnonzero(self.table.active)
        width = min(round_up(int(slots[-1]) + 1, self._row_step), self.cache.slots)
        # Rows in between that are not active are fed too: what they write comes after their session's end, and is written over.
        positions = self._to_device(self.table.position[:width])
        mask = self._mask(positions[:, None], self._length(int(self.table.position[slots].max()) + 1))
        part = Part(slice(0, width), mask, 0, width)
        hidden = self._forward(Pass(self._to_device(self.table.last[:width]), self._row_index[:width], positions, [part]))
        drawn = self._draw(hidden, slice(0, width))
        self.table.position[slots] += 1
        return self._take(slots, drawn, slots)

    def _take(self, slots: np.ndarray, drawn: Drawn, places: np.ndarray) -> list[Turn]:
        """Note the tokens that rows `slots` drew, which stand at `places` of `drawn`; the turns that these finish."""
        ids, logprobs, entropies = drawn[0][places], drawn[1][places], drawn[2]
        count = self.table.count[slots]
        self.table.last[slots] = ids
        self.table.drawn[slots, count] = ids
        self.table.logprob[slots, count] = logprobs
        if entropies is not None:
            self.table.entropy[slots, count] = entropies[places]
        self.table.count[slots] = count + 1
        self._counters["sampled_tokens"] += len(slots)
        stopped = np.isin(ids, self._stop)
        turns = []
        for index in np.flatnonzero(stopped | (count + 1 >= self.table.limit[slots])):
            slot = int(slots[index])
            session = self.table.holder[slot]
            assert session is not None
            number = int(self.table.count[slot])
            tokens = self.table.drawn[slot, :number].tolist()
            reason = "stop" if stopped[index] else ("context" if session.room_ends else "length")
            told = self.table.entropy[slot, :number].tolist() if self.table.candidates[slot] else ()
            turns.append(Turn(session.id, tuple(tokens), tuple(self.table.logprob[slot, :number].tolist()), reason, tuple(told)))
            session.tokens.extend(tokens)
            session.cached = int(self.table.position[slot])
            session.sampling, session.idle_since = None, self._clock
            self.table.active[slot] = False
        return turns
