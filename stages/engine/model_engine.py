"""The engine of models that the torch engine's slot cache does not fit: the model's own forward pass with its own cache.

Correct first: sessions are computed one after the other, so that no padding reaches a recurrent state and a sample never depends
on other sessions. When it is created, the engine finds out by trial what the model's cache can do, and compares itself with the
model's forward pass over entire sequences, by which training computes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages import seeding
from stages.engine.architectures import unserved
from stages.engine.engine import Pause, Sampling, Turn, check_growth, check_length, check_prefix, idle
from stages.engine.head import logits_of
from stages.engine.masks import compact, masked, owners_of
from stages.engine.own_cache import WAYS, OwnForward, Way
from stages.engine.sampling import candidate_entropy, distribution
from stages.engine.self_check import (
    ADVICE,
    FAILURES,
    arbitrary_rows,
    evaluating,
    model_name,
    model_states,
    naming,
    relative_error,
    tolerance,
)
from stages.runtime import spans

COUNTERS = ("sampled_tokens", "fed_tokens", "forward_passes", "forked_tokens")
AT_ONCE, ONE_BY_ONE = 4, 4
"""Tokens that the check adds to each row's cache."""


@dataclass(frozen=True)
class OwnPrefix:
    """A session's tokens with a copy of its cache, if it holds all of them but perhaps some pending ones."""

    token_ids: tuple[int, ...]
    cached: int = 0
    cache: Any = None
    state: Tensor | None = None


@dataclass
class _Draws:
    """The tokens of a turn in progress."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    kept: list[tuple[int, ...]] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)


@dataclass
class _Session:
    id: int
    tokens: list[int]
    cached: int = 0
    """Tokens that the cache holds."""
    cache: Any = None
    state: Tensor | None = None
    """Hidden state [D] after the last cached token."""
    key: int = 0
    sampling: Sampling | None = None
    """None between turns."""
    draws: _Draws = field(default_factory=_Draws)


class ModelEngine:
    """An `Engine` over any Hugging Face causal LM.

    model: put in evaluation mode by the engine; end_of_turn: tokens that end a turn; max_length: longest session in tokens.
    Raises ValueError for a model that is not causal, or that does not run by its own forward pass.

    A call that raises leaves finished turns to the next `advance` and requested ones requested.
    """

    def __init__(self, model: Any, end_of_turn: Iterable[int], max_length: int = 640) -> None:
        if reason := unserved(model.config, max_length):
            raise ValueError(reason)
        self.model, self.max_length = model, max_length
        self._stop = frozenset(end_of_turn)
        self._sessions: dict[int, _Session] = {}
        self._queue: list[_Session] = []
        self._finished: list[Turn] = []
        """Turns not yet returned by `advance`."""
        self._next_id = 0
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._forward = OwnForward(model, choose_way(model, max_length))

    @property
    def way(self) -> Way:
        """How the model's cache is used."""
        return self._forward.way

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def open(self, token_ids: Sequence[int], prefix: OwnPrefix | None = None) -> int:
        """See `Engine.open`. Raises ValueError if the session would be empty or longer than max_length."""
        tokens = [*(prefix.token_ids if prefix else ()), *token_ids]
        check_length(len(tokens), self.max_length)
        session = _Session(self._next_id, tokens)
        if prefix:
            session.cached, session.cache, session.state = prefix.cached, _copied(prefix.cache), prefix.state
        self._next_id += 1
        self._sessions[session.id] = session
        self._counters["forked_tokens"] += session.cached
        return session.id

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        """See `Engine.extend`. Raises ValueError if the session would be longer than max_length."""
        state = idle(self._sessions, session)
        check_growth(session, len(state.tokens), len(token_ids), self.max_length)
        state.tokens.extend(token_ids)

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        state = idle(self._sessions, session)
        state.key, state.sampling, state.draws = key, sampling, _Draws()
        self._queue.append(state)

    @spans.span("engine")
    def advance(self, pause: Pause | None = None) -> list[Turn]:
        with torch.inference_mode():
            while self._queue and not self._finished:
                if self._play(self._queue[0], pause):
                    del self._queue[0]
                else:
                    break
        turns, self._finished = self._finished, []
        return turns

    def snapshot(self, session: int, length: int | None = None) -> OwnPrefix:
        """See `Engine.snapshot`. A part of a session is copied as tokens alone, since a cache need not be divisible."""
        state = idle(self._sessions, session)
        check_prefix(session, len(state.tokens), length)
        if length is not None and length < len(state.tokens):
            return OwnPrefix(tuple(state.tokens[:length]))
        return OwnPrefix(tuple(state.tokens), state.cached, _copied(state.cache), state.state)

    def fork(self, session: int, count: int) -> list[int]:
        """See `Engine.fork`. Pending tokens are fed first, once for all copies."""
        with torch.inference_mode():
            self._feed(idle(self._sessions, session))
        prefix = self.snapshot(session)
        return [self.open((), prefix) for _ in range(count)]

    def read(self, sessions: Sequence[int]) -> list[np.ndarray]:
        """The hidden state after the last token of each idle session, [D] float32 each."""
        with torch.inference_mode():
            states = [self._feed(idle(self._sessions, session)) for session in sessions]
        return [state.float().cpu().numpy() for state in states]

    def close(self, session: int) -> None:
        state = self._sessions.pop(session)
        if state in self._queue:
            self._queue.remove(state)
        self._finished = [turn for turn in self._finished if turn.session != session]

    def reset(self) -> None:
        """Close every session. Weights may change only while none is open; caches and snapshots belong to the old weights."""
        for session in sorted(self._sessions):
            self.close(session)

    # ---- forward passes and turns -------------------------------------------------------------------------------------------

    def _feed(self, session: _Session) -> Tensor:
        """The hidden state [D] after the session's last token."""
        if self.model.training:
            self.model.eval()
        new = len(session.tokens) - session.cached
        if new or session.state is None:
            self._counters["forward_passes"] += 1
            cache, session.cache = session.cache, None
            start, session.cached = session.cached, 0  # if the pass fails, the next one starts anew
            hidden, session.cache = self._forward.feed(session.tokens, start, cache)
            session.cached, session.state = len(session.tokens), hidden[-1]
            if session.sampling is None or not session.draws.ids:  # not those that the turn in progress draws
                self._counters["fed_tokens"] += new
                spans.count("fed_tokens", new)
        assert session.state is not None
        return session.state

    def _play(self, session: _Session, pause: Pause | None) -> bool:
        """Draw the tokens of a requested turn until it is finished; False if `pause` interrupted it."""
        sampling, draws = session.sampling, session.draws
        assert sampling is not None
        room = self.max_length - len(session.tokens) + len(draws.ids)
        reason = ""
        while not reason:
            if len(draws.ids) == min(room, sampling.max_tokens):
                reason = "context" if room <= sampling.max_tokens else "length"
                break
            self._draw(session, sampling, self._feed(session))
            if draws.ids[-1] in self._stop:
                reason = "stop"
            elif pause and pause() and len(draws.ids) < min(room, sampling.max_tokens):
                return False
        session.sampling = None
        owners = owners_of(draws.forced, sampling.mask) if sampling.mask is not None else ()
        values = (tuple(draws.ids), tuple(draws.logprobs), reason, tuple(draws.entropies), tuple(draws.kept), owners)
        self._finished.append(Turn(session.id, *values, tuple(draws.left)))
        return True

    def _draw(self, session: _Session, sampling: Sampling, state: Tensor) -> None:
        """Draw the next token from the hidden state [D] and append it."""
        device, draws = state.device, session.draws
        logits = logits_of(self.model, state[None])
        temperature = torch.tensor([sampling.temperature], dtype=torch.float64, device=device)
        mask, left = sampling.mask, 0.0
        if mask is not None:
            logits, shares, forced = masked(logits, [mask], temperature)
            left = float(shares)
            draws.left.append(left)
            draws.forced.append(bool(forced[0]))
        top_p = torch.tensor([sampling.top_p], dtype=torch.float64, device=device)
        drawn_from = distribution(logits, temperature, top_p, torch.tensor([sampling.top_k], device=device))
        uniform = seeding.uniform(np.array([session.key], dtype=np.uint64), np.array([len(draws.ids)]))
        ids, logprobs = drawn_from.draw(torch.from_numpy(uniform).to(device))
        if sampling.candidates:
            wanted = torch.tensor([sampling.candidates], device=device)
            draws.entropies.append(float(candidate_entropy(logits, temperature, wanted)))
        if sampling.kept and (sampling.restricted or (mask is not None and mask.renormalise)):
            kept = drawn_from.kept()[0]
            draws.kept.append(tuple((kept if mask is None else compact(kept, logits.shape[-1])).tolist()))
        draws.ids.append(int(ids))
        draws.logprobs.append(float(logprobs) + (left if mask is not None and not mask.renormalise else 0.0))
        if mask is not None:
            mask.append(int(ids))
        session.tokens.append(int(ids))
        self._counters["sampled_tokens"] += 1
        spans.count("sampled_tokens", 1)


@torch.inference_mode()
def _copied(cache: Any) -> Any:
    """A copy of a cache that shares no tensor with it."""
    return copy.deepcopy(cache)


def choose_way(model: Any, max_length: int) -> Way:
    """The fastest way of `WAYS` whose hidden states are those of the model's forward pass over entire sequences. Raises
    ValueError if none is, which happens for models that are not causal."""
    rows = arbitrary_rows(model, max_length)
    with torch.inference_mode(), evaluating(model):
        with naming(model, "does not run by its own forward pass"):
            expected = model_states(model, rows)
        least, problem = float("inf"), ""
        for way in WAYS:
            try:
                forward = OwnForward(model, way)
                error = max(_error(forward, row, states) for row, states in zip(rows, expected, strict=True))
            except FAILURES as failure:
                if isinstance(failure, torch.OutOfMemoryError):
                    raise
                problem = str(failure)
                continue
            if error <= tolerance(model):
                return way
            least = min(least, error)
    found = f"hidden states differ by {least:.2g} of their norm" if least < float("inf") else f"the pass fails ({problem})"
    raise ValueError(
        f"{model_name(model)} can't be computed token by token: {found} compared with its forward pass over entire sequences, so "
        f"sampling and training probabilities would differ; {ADVICE}"
    )


def _error(forward: OwnForward, row: Sequence[int], expected: Tensor) -> float:
    """The larger of the relative errors of tokens fed at once and one by one after a prompt, as in an episode."""
    prompt = max(len(row) - AT_ONCE - ONE_BY_ONE, 1)
    ends = [prompt, *range(min(prompt + AT_ONCE, len(row)), len(row) + 1)]
    found, cache, at = [], None, 0
    for end in sorted(set(ends)):
        hidden, cache = forward.feed(row[:end], at, cache)
        found.append(hidden)
        at = end
    states = torch.cat(found)
    pieces = [slice(0, prompt), slice(prompt, prompt + AT_ONCE), slice(prompt + AT_ONCE, None)]
    return max(relative_error(states[piece], expected[piece]) for piece in pieces if len(states[piece]))
