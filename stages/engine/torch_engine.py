"""The default generation engine: continuous batching over slots with PyTorch and the Hugging Face model itself.

A session with a requested turn holds a slot (one row of the key/value cache). Its new tokens are fed in padded groups, then all
active rows decode together, one token per forward pass; as rows finish, waiting sessions enter. A session keeps its slot between
turns, so that only its new observation is fed, until another session needs the slot: then the cache of the longest-idle session
moves to host memory, to be copied back at its next turn.

Samples do not depend on neighbouring sessions, bit for bit on a CPU: random numbers are counter-based, every pass has a multiple
of 4 rows (with fewer, the matrix kernels sum in another order), and a session's tokens are fed in the same kind of pass whatever
else runs. On a GPU, and in mixtures of experts, whose kernels give no such guarantee, this holds up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.engine.adapter_view import AdapterView, share_base
from stages.engine.architectures import unserved, unslotted, windows
from stages.engine.cache import SlotCache
from stages.engine.cuda_graphs import make_forward
from stages.engine.drawing import Drawn, draw_rows, joined
from stages.engine.engine import Pause, Sampling, Turn, check_growth, check_length, check_prefix, idle
from stages.engine.forward import Forward, Pass
from stages.engine.head import logits_of
from stages.engine.passes import LENGTH_STEP, QUERY_STEP, PassBuilder
from stages.engine.self_check import check_against_model, model_name, warn_of_processor
from stages.engine.slots import Prefix, Session, SlotTable, padded, pending, round_up
from stages.runtime import spans

CHUNK = 256
"""Maximum tokens fed per row in one pass."""
PASS_TOKENS = 4096
"""Maximum tokens fed in one pass, each row's rounded up."""
DRAWN_LOGITS = {"cpu": 1 << 20}
"""Maximum logits that one draw copies to float64, by device, elsewhere 1 << 26 (512 MB): 8 MB stay in a CPU's caches."""
BATCH_SHARE = {"cpu": 0.25}
"""See `TorchEngine`, by device, elsewhere 0.5: on a GPU a feeding pass of few tokens costs as much as eight decoding passes."""
COUNTERS = ("sampled_tokens", "fed_tokens", "forward_passes", "forked_tokens")
READING = Sampling()
"""Placeholder that marks sessions as busy while `read` runs."""


class TorchEngine:
    """An `Engine` over a Hugging Face causal LM.

    model: put in evaluation mode by the engine; end_of_turn: tokens that end a turn; slots: sessions that decode at once;
    max_length: longest session in tokens; batch_share: `advance` returns when this share of the running turns is finished, which
    saves feeding passes (the turns are the same); None: that of BATCH_SHARE. Raises
    ValueError for an unsupported architecture, detected from the configuration or by comparison with the model's own forward
    pass.

    A call that raises leaves the sessions unchanged: requested turns stay requested, and finished ones are returned by the next
    `advance`. So the caller can retry, or close the sessions that it abandons.
    """

    def __init__(
        self, model: Any, end_of_turn: Iterable[int], slots: int = 64, max_length: int = 640, batch_share: float | None = None
    ) -> None:
        config = model.config
        if reason := unserved(config, max_length):
            raise ValueError(reason)
        if reason := unslotted(config):
            raise ValueError(f"{model_name(model)} does not run in the torch engine: {reason}")
        self.model, self.slots, self.max_length = model, slots, max_length
        self.device = model.device
        self.batch_share = BATCH_SHARE.get(self.device.type, 0.5) if batch_share is None else batch_share
        self._stop = np.array(sorted(set(end_of_turn)), dtype=np.int64)
        heads = config.num_attention_heads
        self.cache = SlotCache(
            config.num_hidden_layers,
            padded(slots),
            getattr(config, "num_key_value_heads", None) or heads,
            round_up(max_length, LENGTH_STEP),
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            model.dtype,
            self.device,
            windows(config),
        )
        self._layers = make_forward(model, self.cache)
        self._beside: list[tuple[Any, Forward]] = []
        """Other models and their passes, of adapters 1, 2 and so on."""
        self._passes = PassBuilder(self.cache, model.dtype)
        self.table = SlotTable(self.cache, slots, max_length)
        self._sessions: dict[int, Session] = {}
        self._queue: list[Session] = []
        self._finished: list[Turn] = []
        """Turns not yet returned by `advance`."""
        self._next_id = 0
        self._clock = 0
        self._counters = dict.fromkeys(COUNTERS, 0)
        check_against_model(self)
        warn_of_processor(model)
        self._counters = dict.fromkeys(COUNTERS, 0)

    # ---- the protocol -------------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        return {**self._counters, "evictions": self.table.evictions}

    def beside(self, model: Any) -> AdapterView:
        """This engine as that of another model with the same base, whose sessions share the slots and the cache with the others.
        Raises ValueError if the models differ in more than their adapters."""
        if not share_base(self.model, model):
            raise ValueError("the models differ in more than their adapters; make an engine for each")
        self._beside.append((model, self._layers.beside(model)))
        return AdapterView(self, len(self._beside))

    def open(self, token_ids: Sequence[int], prefix: Prefix | None = None, adapter: int = 0) -> int:
        """See `Engine.open`; adapter: which model's, see `beside`. Raises ValueError if the session would be empty or longer than
        max_length, or for the prefix of another model's session."""
        tokens = [*(prefix.token_ids if prefix else ()), *token_ids]
        check_length(len(tokens), self.max_length)
        if prefix and prefix.adapter != adapter:
            raise ValueError(f"the prefix is of a session with adapter {prefix.adapter}; it can't be continued with {adapter}")
        if not self._sessions:
            for layers in (self._layers, *(layers for _, layers in self._beside)):
                layers.refresh()
        cache, cached = (prefix.cache, prefix.cached) if prefix else (None, 0)
        session = Session(self._next_id, tokens, cache, cached, adapter)
        if prefix and not token_ids:
            session.state = prefix.state
        self._next_id += 1
        self._sessions[session.id] = session
        self._counters["forked_tokens"] += session.cached
        return session.id

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        """See `Engine.extend`. Raises ValueError if the session would be longer than max_length."""
        state = idle(self._sessions, session)
        check_growth(session, len(state.tokens), len(token_ids), self.max_length)
        state.tokens.extend(token_ids)
        if token_ids:
            state.state = None

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        state = idle(self._sessions, session)
        state.key, state.sampling = key, sampling
        self._queue.append(state)

    @spans.span("engine")
    def advance(self, pause: Pause | None = None) -> list[Turn]:
        self._clock += 1
        self._evaluating()
        with torch.inference_mode(), self.table.guarded():
            self._start()
            running = len(self._finished) + int(self.table.active.sum())
            wanted = max(1, math.ceil(running * self.batch_share))
            while len(self._finished) < wanted and self.table.active.any() and not (pause and pause()):
                self._step()
        turns, self._finished = self._finished, []
        return sorted(turns, key=lambda turn: turn.session)

    def snapshot(self, session: int, length: int | None = None) -> Prefix:
        """See `Engine.snapshot`. Runs no forward pass: tokens not fed yet are copied as tokens."""
        state = idle(self._sessions, session)
        check_prefix(session, len(state.tokens), length)
        cached = state.cached
        if length is not None and length < len(state.tokens):
            cached = min(cached, length - 1)  # the last token is fed again, since the next draw needs its hidden state
        made = partial(Prefix, tuple(state.tokens[:length]), adapter=state.adapter)
        if not cached:
            return made(None)
        held = state.prefix[:, :, :, :cached] if state.prefix is not None else self.cache.copy_out(state.slot, cached)
        return made(held, state.state if cached == len(state.tokens) else None)

    @spans.span("engine")
    def read(self, sessions: Sequence[int]) -> list[np.ndarray]:
        """The hidden state after the last token of each idle session, [D] float32 each.

        Tokens not fed yet are fed in as few passes as the slots allow. The next turn, also from a `snapshot`, reuses the state.
        """
        waiting = [idle(self._sessions, session) for session in sessions]
        self._evaluating()
        with torch.inference_mode(), self.table.guarded():
            while waiting := [session for session in waiting if session.state is None]:
                self._read(waiting)
        states = [self._sessions[session].state for session in sessions]
        return [state.float().cpu().numpy() for state in states if state is not None]

    def _read(self, sessions: list[Session]) -> None:
        """Compute the states of as many sessions as get a slot."""
        placed: list[Session] = []
        try:
            for session in sessions:
                if not self.table.place(session):
                    break
                session.sampling = READING  # so that the others do not take its slot
                placed.append(session)
        finally:
            for session in placed:
                session.sampling = None
        if not placed:
            raise RuntimeError("no free slot to read a session: all are in the middle of a turn; call advance() first")
        for session in placed:
            self._leave_last(session)
        for number, state in self._feed(placed, keep=0).items():
            self._sessions[number].state = state

    def _leave_last(self, session: Session) -> None:
        """Make the last token of a session in a slot pending again, since its hidden state is needed."""
        if session.cached == len(session.tokens):
            session.cached -= 1
            self.table.position[session.slot] = session.cached

    @spans.span("engine")
    def fork(self, session: int, count: int) -> list[int]:
        """See `Engine.fork`. Pending tokens but the last are fed first, together with those of other idle sessions: for speed,
        open all prompts, then fork each."""
        if len(pending(idle(self._sessions, session))) > 1:
            self._fill(session)
        prefix = self.snapshot(session)
        return [self.open((), prefix, prefix.adapter) for _ in range(count)]

    def close(self, session: int) -> None:
        state = self._sessions.pop(session)
        if state in self._queue:
            self._queue.remove(state)
        self._finished = [turn for turn in self._finished if turn.session != session]
        if state.slot >= 0:
            self.table.vacate(state)

    def reset(self) -> None:
        """Close every session. Weights may change only while none is open; caches and snapshots belong to the old weights."""
        for session in sorted(self._sessions):
            self.close(session)

    # ---- forward passes -----------------------------------------------------------------------------------------------------

    def _evaluating(self) -> None:
        """Put the models in evaluation mode."""
        for model in (self.model, *(model for model, _ in self._beside)):
            if model.training:
                model.eval()

    def _forward(self, batch: Pass, adapter: int) -> Tensor:
        """Hidden states [n, D] of the pass's output tokens, with the weights of model `adapter`."""
        self._counters["forward_passes"] += 1
        layers = self._beside[adapter - 1][1] if adapter else self._layers
        return layers(batch)

    def _feed_pass(self, groups: list[list[Session]], sizes: dict[int, int]) -> Tensor:
        """Feed `sizes[id]` pending tokens of each session, all with the same weights, in one pass; hidden states [n, D] of the
        last ones, in order."""
        batch, tokens = self._passes.feeding(groups, sizes)
        hidden = self._forward(batch, groups[0][0].adapter)
        for session in (session for group in groups for session in group):
            session.cached += sizes[session.id]
            self.table.position[session.slot] = session.cached
        self._counters["fed_tokens"] += tokens
        spans.count("fed_tokens", tokens)
        return hidden

    def _feed(self, sessions: list[Session], keep: int) -> dict[int, Tensor]:
        """Feed the pending tokens of sessions in slots except the last `keep`; return hidden states [D] after them, by id."""
        after: dict[int, Tensor] = {}
        for adapter in sorted({session.adapter for session in sessions}):
            after |= self._feed_alike([session for session in sessions if session.adapter == adapter], keep)
        return after

    def _feed_alike(self, sessions: list[Session], keep: int) -> dict[int, Tensor]:
        """`_feed` for sessions with the same weights."""
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
            groups = self._passes.groups(chosen, sizes)
            hidden = self._feed_pass(groups, sizes)
            after.update(zip((session.id for group in groups for session in group), hidden, strict=False))
            left = [session for session in left if len(session.tokens) - keep > session.cached]
        return after

    def _fill(self, first: int) -> None:
        """Feed session `first`, and other idle ones that hold or can take a free slot, up to their last token."""
        self._evaluating()
        with torch.inference_mode(), self.table.guarded():
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

    def _start(self) -> None:
        """Admit waiting sessions, feed their pending tokens and draw their first tokens."""
        entering = self._enter()
        if not entering:
            return
        for session in entering:
            if session.state is None:
                self._leave_last(session)
        read = {session.id: session.state for session in entering if session.state is not None}
        hidden = {**read, **self._feed(entering, keep=0)}
        states = torch.stack([hidden[session.id] for session in entering])
        slots = np.array([session.slot for session in entering], dtype=np.int64)
        fill = padded(len(slots)) - len(slots)
        states = torch.cat([states, states[:1].expand(fill, -1)])
        drawn = self._draw(states, np.concatenate([slots, np.repeat(slots[:1], fill)]))
        for session in entering:
            session.state = None
            self._queue.remove(session)
        self.table.active[slots] = True
        self._take(slots, drawn, np.arange(len(slots)))
        self.table.compact()

    def _enter(self) -> list[Session]:
        """Give queued sessions slots and return them. They stay queued until their first token is drawn; turns of sessions
        without room for a token finish here."""
        entering = []
        for session in list(self._queue):
            assert session.sampling is not None
            room = self.max_length - len(session.tokens)
            if room < 1:
                self._queue.remove(session)
                session.sampling = None
                self._finished.append(Turn(session.id, (), (), "context"))
            elif self.table.place(session):
                entering.append(session)
                self.table.begin(session, room)
        return entering

    def _draw(self, hidden: Tensor, rows: np.ndarray | slice) -> Drawn:
        """Draw the next tokens of cache rows `rows` from hidden states [N, D]; of a large vocabulary, of some rows at a time."""
        logits = logits_of(self.model, hidden)
        every = np.arange(self.cache.slots + 1)[rows]
        step = max(1, DRAWN_LOGITS.get(self.device.type, 1 << 26) // logits.shape[-1])
        parts = [
            draw_rows(logits[at : at + step], self.table, every[at : at + step], self._passes.to_device)
            for at in range(0, len(every), step)
        ]
        return parts[0] if len(parts) == 1 else joined(parts)

    def _step(self) -> None:
        """Decode one token for every active row."""
        slots = np.flatnonzero(self.table.active)
        hidden = self._decode()
        drawn = self._draw(hidden, slice(0, len(hidden)))
        self.table.position[slots] += 1
        self._take(slots, drawn, slots)

    def _decode(self) -> Tensor:
        """Hidden states [N, D] after the last tokens of the first N rows, which include all active ones; one pass for all rows
        with the same weights."""
        table = self.table
        width = min(round_up(padded(int(np.flatnonzero(table.active)[-1]) + 1), self._passes.row_step), self.cache.slots)
        hidden: Tensor | None = None
        for adapter in sorted(set(table.adapter[table.active].tolist())):
            own = (table.active & (table.adapter == adapter))[:width]
            states = self._forward(self._passes.decoding(table.last[:width], table.position[:width], own), adapter)
            hidden = states if hidden is None else torch.where(self._passes.to_device(own)[:, None], states, hidden)
        assert hidden is not None, "a row is active"
        return hidden

    def _take(self, slots: np.ndarray, drawn: Drawn, places: np.ndarray) -> None:
        """Record the tokens of rows `slots`, found at `places` of `drawn`, and finish turns that they complete."""
        ids, count = drawn.ids[places], self.table.count[slots]
        self.table.record(slots, drawn, places)
        self.table.count[slots] = count + 1
        self._counters["sampled_tokens"] += len(slots)
        spans.count("sampled_tokens", len(slots))
        stopped = np.isin(ids, self._stop)
        for index in np.flatnonzero(stopped | (count + 1 >= self.table.limit[slots])):
            slot = int(slots[index])
            session = self.table.holder[slot]
            assert session is not None
            reason = "stop" if stopped[index] else ("context" if session.room_ends else "length")
            self._finished.append(self.table.turn(session, reason))
            tokens = self._finished[-1].token_ids
            session.tokens.extend(tokens)
            session.cached = int(self.table.position[slot])
            session.sampling, session.idle_since = None, self._clock
            self.table.active[slot] = False
