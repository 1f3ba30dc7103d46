"""Enforces a domain's constraint on the policy's turns: an engine wrapper that masks tokens, or draws turns anew.

Rollouts, trees and the selection of actions are unaware of it. The position in the formula is read from the tokens of a session,
which hold the entire conversation, so that branches and copies continue where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stages.agent.chat import Chat
from stages.agent.turn_masks import GrammarMask, SpecMask, SpecTexts, token_matcher
from stages.agent.turn_vocabulary import TurnVocabulary
from stages.agent.wrapped_engine import WrappedEngine
from stages.constraints.monitor import Position
from stages.constraints.settings import Constraint
from stages.constraints.transcript import Reading, Transcripts
from stages.engine.engine import Engine, EngineError, Pause, Sampling, Turn
from stages.engine.local_engine import LocalEngine
from stages.engine.masks import TokenMask
from stages.environments.protocol import Domain
from stages.records.episode import Owner
from stages.seeding import key64

TRIES = 16
"""rollback: goes back in one turn at most; what follows is masked."""


@dataclass
class _Request:
    """A turn in progress. `parts`: its finished pieces; `tries`: draws so far; `base`: the wrapped session before it."""

    key: int
    sampling: Sampling
    room: int
    base: Any = None
    parts: list[Turn] = field(default_factory=list)
    tries: int = 1


@dataclass
class _Session:
    """A caller's session. `read`: the tokens before a turn, of which `position` and `turns` tell (-1: none yet); `turns`: those
    of the environment, for which each command is one; position None: the history violates the constraint, and nothing is
    enforced."""

    inner: int
    tokens: list[int]
    position: Position | None
    read: int = 0
    turns: int = 0
    request: _Request | None = None

    def copy(self, inner: int, length: int | None = None) -> _Session:
        """With its first `length` tokens; a session cut within what was read begins to read anew."""
        tokens = self.tokens[:length]
        if len(tokens) < self.read:
            return _Session(inner, tokens, None, -1)
        return _Session(inner, tokens, self.position, self.read, self.turns)


class ConstrainedEngine(WrappedEngine[_Session]):
    """An `Engine` over another one that enforces `constraint`. max_length: longest session in tokens; max_turns: of an episode.

    Raises EngineError if masks are needed and the engine is none of this process.
    """

    def __init__(self, engine: Engine, chat: Chat, constraint: Constraint, max_length: int, max_turns: int | None = None) -> None:
        super().__init__(engine)
        self.chat, self.constraint, self.rules = chat, constraint, constraint.rules
        self.max_length = max_length
        self.max_turns = math.inf if max_turns is None else float(max_turns)
        self.counts = {"masked_tokens": 0, "forced_tokens": 0, "redrawn_turns": 0, "redrawn_tokens": 0}
        vocabulary = TurnVocabulary(chat)
        self._texts = SpecTexts(self.rules, vocabulary) if isinstance(self.rules, Transcripts) else None
        self._matcher = None if isinstance(self.rules, Transcripts) else token_matcher(self.rules, vocabulary)
        self._vocabulary = vocabulary

    @property
    def counters(self) -> dict[str, int]:
        """The engine's, with `masked_tokens` (drawn under a mask), `forced_tokens`, and turns and tokens drawn in vain."""
        return {**self.engine.counters, **self.counts}

    # ---- sessions -----------------------------------------------------------------------------------------------------------

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        if prefix is None:
            return self._add(_Session(self.engine.open(token_ids), list(token_ids), None, -1))
        copied, inner = prefix
        session = copied.copy(self.engine.open(token_ids, inner))
        session.tokens.extend(token_ids)
        return self._add(session)

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        state = self._sessions[session]
        self.engine.extend(state.inner, token_ids)
        state.tokens.extend(token_ids)

    def snapshot(self, session: int, length: int | None = None) -> Any:
        state = self._sessions[session]
        return state.copy(-1, length), self.engine.snapshot(state.inner, length)

    def fork(self, session: int, count: int) -> list[int]:
        state = self._sessions[session]
        return [self._add(state.copy(inner)) for inner in self.engine.fork(state.inner, count)]

    def close(self, session: int) -> None:
        self._close_inner(self._sessions.pop(session).inner)

    def reset(self) -> None:
        """Close every session."""
        for session in sorted(self._sessions):
            self.close(session)

    def read(self, sessions: Sequence[int]) -> list[np.ndarray]:
        """See `TorchEngine.read`."""
        engine: Any = self.engine
        return list(engine.read([self._sessions[session].inner for session in sessions]))

    # ---- turns --------------------------------------------------------------------------------------------------------------

    def _follow(self, state: _Session) -> str:
        """Read the session up to its end; returns what the policy has written of a turn in progress."""
        begun = state.read >= 0
        if not begun:
            state.position, state.read, state.turns = self.rules.start, 0, 0
        *finished, written = self.chat.turn_texts(state.tokens[state.read :], begun) or [""]
        for text in finished:
            state.position = self.rules.next_turn(self.rules.read(state.position, text).position)
            state.turns += len(self.rules.commands(text)) or 1  # a turn without commands is one, too
        state.read = -1 if written.strip() else len(state.tokens)
        return written

    def _mask(self, state: _Session, room: int, written: str) -> TokenMask | None:
        if state.position is None:
            return None
        if self._texts is None:
            matcher = self._matcher.deep_copy()
            for token in self._vocabulary.within(written) if written else ():
                matcher.consume_token(token)
            return GrammarMask(matcher, self.constraint, self._vocabulary)
        turns = self.max_turns - state.turns
        if not written:
            return SpecMask(self._texts, self.constraint, state.position, room, turns)
        return self._resumed(state.position, room, turns, written, one_choice=False)

    def _resumed(self, position: Position, room: int, turns: float, written: str, *, one_choice: bool) -> SpecMask | None:
        """The mask of a turn that goes on after `written`; None if that violates the formula."""
        assert self._texts is not None
        rules = self._texts.rules
        state, content, sent = None, "", 0
        for begun, text, _ in rules.segments(written):
            if begun is None or begun.name not in rules.monitor.choices(position):
                return None
            position, state, content = rules.monitor.step(position, begun.name), begun, text
            sent += bool(begun.send)
        turns -= max(sent - 1, 0)
        return SpecMask(
            *(self._texts, self.constraint, position, room, turns), state=state, content=content, one_choice=one_choice, sent=sent
        )

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        state = self._sessions[session]
        written = self._follow(state)
        room = min(sampling.max_tokens, self.max_length - len(state.tokens))
        state.request = _Request(key, sampling, room)
        if self.constraint.enforcement == "mask":
            sampling = replace(sampling, mask=self._mask(state, room, written))
        elif state.position is not None and not written:
            state.request.base = self.engine.snapshot(state.inner)
        self._outer[state.inner] = session
        self.engine.request(state.inner, key, sampling)

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        turns: list[Turn] = []
        while not turns and self._outer and not (pause and pause()):
            for turn in self.engine.advance(pause):
                session = self._outer.pop(turn.session)
                found = self._finish(session, self._sessions[session], turn)
                turns += [found] if found is not None else []
        return sorted(turns, key=lambda turn: turn.session)

    def _finish(self, session: int, state: _Session, turn: Turn) -> Turn | None:
        """The caller's turn; None if it is drawn again, in part or whole."""
        request = state.request
        assert request is not None
        if turn.left:
            self.counts["masked_tokens"] += len(turn.token_ids)
            self.counts["forced_tokens"] += sum(owner == Owner.FORCED for owner in turn.owners)
        whole = _joined([*request.parts, turn])
        if request.base is not None and whole.token_ids:
            reading = self.rules.read(state.position, self.chat.turn_text(whole.token_ids))
            if reading.violation:
                retry = self.constraint.enforcement == "retry"
                if retry and request.tries < self.constraint.retries:
                    self._again(session, state, request, [], whole)
                    return None
                if not retry and request.tries < TRIES:
                    self._back(session, state, request, whole, reading)
                    return None
        state.tokens.extend(whole.token_ids)
        state.request = None
        return replace(whole, session=session)

    def _again(self, session: int, state: _Session, request: _Request, kept: list[Turn], drawn: Turn) -> None:
        """Draw the turn again after the pieces in `kept`."""
        written = [token for part in kept for token in part.token_ids]
        self.counts["redrawn_turns"] += 1
        self.counts["redrawn_tokens"] += len(drawn.token_ids) - len(written)
        self._close_inner(state.inner)
        state.inner = self.engine.open(written, request.base)
        key = key64(request.key, "constraint", request.tries)
        request.parts, request.tries = kept, request.tries + 1
        sampling = replace(request.sampling, max_tokens=max(request.room - len(written), 1))
        if self.constraint.enforcement == "rollback":
            assert state.position is not None
            text, turns = self.chat.turn_text(written), self.max_turns - state.turns
            freely = request.tries < TRIES
            mask = self._resumed(state.position, sampling.max_tokens, turns, text, one_choice=freely)
            sampling = replace(sampling, mask=mask)
        self._outer[state.inner] = session
        self.engine.request(state.inner, key, sampling)

    def _fits(self, state: _Session, request: _Request, text: str, kept: int) -> bool:
        """Whether the turn can still end in time after its first `kept` tokens."""
        assert state.position is not None
        room, turns = request.room - kept, self.max_turns - state.turns
        mask = self._resumed(state.position, room, turns, text, one_choice=True) if text.strip() else None
        return mask is not None and mask.least <= room

    def _back(self, session: int, state: _Session, request: _Request, whole: Turn, reading: Reading) -> None:
        """Take back what violates the formula, and choose among the valid states."""
        kept = len(whole.token_ids) - (whole.token_ids[-1] == self.chat.end_of_turn)
        before = len(self.chat.turn_text(whole.token_ids)[: reading.at].rstrip())
        while kept:
            text = self.chat.turn_text(whole.token_ids[:kept]).rstrip()
            if len(text) <= before and self._fits(state, request, text, kept):
                break
            kept -= 1
        self._again(session, state, request, [_cut(whole, kept)] if kept else [], whole)


def _cut(turn: Turn, count: int) -> Turn:
    """The first `count` tokens of a turn."""
    lists = ("token_ids", "logprobs", "entropies", "kept", "owners", "left")
    return replace(turn, **{name: getattr(turn, name)[:count] for name in lists})


def _joined(parts: Sequence[Turn]) -> Turn:
    """The pieces of one turn as one. Lists that a piece lacks are filled with neutral values if another one has them."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    neutral: dict[str, Any] = {"entropies": 0.0, "kept": (), "owners": int(Owner.POLICY), "left": 0.0}
    joined: dict[str, Any] = {
        name: tuple(value for part in parts for value in getattr(part, name)) for name in ("token_ids", "logprobs")
    }
    for name, fill in neutral.items():
        if any(getattr(part, name) for part in parts):
            joined[name] = tuple(value for part in parts for value in getattr(part, name) or (fill,) * len(part.token_ids))
    return replace(last, **joined)


def constrained(engine: Engine, chat: Chat, domain: Domain, stage: str, max_length: int) -> Engine:
    """The engine, or, where the domain has a constraint that `stage` enforces, one that enforces it."""
    settings = getattr(domain, "settings", None)
    constraint: Constraint | None = getattr(settings, "constraint", None)
    if constraint is None or not constraint.enforces(stage):
        return engine
    if constraint.enforcement in ("mask", "rollback") and not isinstance(getattr(engine, "engine", engine), LocalEngine):
        raise EngineError(
            f"per_domain.{domain.name}.environment.constraint.enforcement: {constraint.enforcement} masks tokens, which only "
            f"resources.engine.kind torch can; set enforcement to retry or report_only, or kind to torch"
        )
    return ConstrainedEngine(engine, chat, constraint, max_length, getattr(settings, "max_turns", None))
