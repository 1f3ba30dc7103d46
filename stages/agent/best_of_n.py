"""Best of n actions: an engine that draws n turns where one is asked for, and goes on with the one that a scorer ranks first.

It stands between whoever plays and a real engine, so that rollouts know nothing of it. The first of the n draws has the key that
was asked with: with n = 1 the same turns come back as from the engine alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stages.engine.engine import Engine, Pause, Sampling, Turn
from stages.seeding import key64

Same = Callable[[Sequence[int]], str]
"""Tokens of a turn -> what makes it the same action as another."""


class Ranking(Protocol):
    """What orders the different actions that were drawn, A of them."""

    def __call__(self, history: Sequence[int], turns: Sequence[Turn]) -> Sequence[float]:
        """A scores, the higher the better; they depend on nothing but history and turns."""
        ...


def by_logprob(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
    """The policy's own log-probability of each turn, under the distribution that it was drawn from."""
    return [sum(turn.logprobs) for turn in turns]


def by_scorer(scorer: Any) -> Ranking:
    """The scores of a `stages.values.q_model.ActionScorer`."""

    def rank(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
        return scorer.scores(history, [turn.token_ids for turn in turns]).tolist()

    return rank


def per_token(rank: Ranking) -> Ranking:
    """`rank` with each score divided by the number of the turn's tokens."""

    def ranked(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
        scores = rank(history, turns)
        return [score / max(1, len(turn.token_ids)) for score, turn in zip(scores, turns, strict=True)]

    return ranked


def choose(history: Sequence[int], turns: Sequence[Turn], rank: Ranking | None, same: Same) -> int:
    """The place of the best turn; without `rank`, of the action that most of them are. Turns that are the same action count as
    the first of them; ties go to the one that the policy itself finds likelier, then to the one drawn first. A turn without
    tokens (no room) is taken only if there is no other."""
    first: dict[str, int] = {}
    votes: Counter[str] = Counter()
    for place, turn in enumerate(turns):
        if turn.token_ids:
            action = same(turn.token_ids)
            first.setdefault(action, place)
            votes[action] += 1
    places = list(first.values())
    if len(places) < 2:
        return places[0] if places else 0
    scores = rank(history, [turns[place] for place in places]) if rank else [float(votes[action]) for action in first]
    ordered = sorted(zip(places, scores, strict=True), key=lambda pair: (-pair[1], -sum(turns[pair[0]].logprobs), pair[0]))
    return ordered[0][0]


@dataclass
class _Session:
    """One session as its caller knows it; `inner`: the engine's own, and while a turn is drawn those of all its draws; `n` and
    `rank`: how the next turn is chosen."""

    tokens: list[int]
    inner: list[int]
    n: int
    rank: Ranking | None
    drawn: dict[int, Turn] = field(default_factory=dict)


def _check_draws(n: int) -> None:
    if n < 1:
        raise ValueError(f"best of {n} actions; at least 1 must be drawn")


class BestOfEngine:
    """`stages.engine.engine.Engine` over another one; `n` draws for each turn, where a session has no number of its own; without
    `rank` they vote. Raises ValueError for n below 1."""

    def __init__(self, engine: Engine, n: int, rank: Ranking | None, same: Same) -> None:
        _check_draws(n)
        self.engine, self.n, self.rank, self.same = engine, n, rank, same
        self._sessions: dict[int, _Session] = {}
        self._of: dict[int, int] = {}
        """Inner session -> the caller's, while a turn is drawn."""
        self._next = 0
        self._counters = {"decisions": 0, "other_than_first": 0}

    @property
    def counters(self) -> dict[str, int]:
        """The engine's, with `decisions` (turns that there was a choice for) and `other_than_first`, those in which the first
        draw was not taken."""
        return {**self.engine.counters, **self._counters}

    def _add(self, tokens: Sequence[int], inner: int) -> int:
        self._sessions[self._next] = _Session(list(tokens), [inner], self.n, self.rank)
        self._next += 1
        return self._next - 1

    def choose_by(self, session: int, n: int, rank: Ranking | None) -> None:
        """Let the session's next turns be the best of `n` by `rank`, or by vote without one. Raises ValueError for n below 1."""
        _check_draws(n)
        state = self._sessions[session]
        state.n, state.rank = n, rank

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        held, inside = prefix if prefix is not None else ((), None)
        return self._add([*held, *token_ids], self.engine.open(token_ids, inside))

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        state = self._sessions[session]
        self.engine.extend(state.inner[0], token_ids)
        state.tokens.extend(token_ids)

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        state = self._sessions[session]
        if state.n > 1:
            state.inner += self.engine.fork(state.inner[0], state.n - 1)
        for place, inner in enumerate(state.inner):
            self._of[inner] = session
            self.engine.request(inner, key if place == 0 else key64(key, "best_of", place), sampling)

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        turns: list[Turn] = []
        while not turns and self._of and not (pause and pause()):
            whole = set()
            for turn in self.engine.advance(pause):
                session = self._of.pop(turn.session)
                state = self._sessions[session]
                state.drawn[turn.session] = turn
                if len(state.drawn) == len(state.inner):
                    whole.add(session)
            turns = [self._decide(session) for session in sorted(whole)]
        return turns

    def _decide(self, session: int) -> Turn:
        """Go on with the best draw of a session, all of whose draws are there."""
        state = self._sessions[session]
        drawn = [state.drawn[inner] for inner in state.inner]
        best = choose(state.tokens, drawn, state.rank, self.same) if state.n > 1 else 0
        self._counters["decisions"] += state.n > 1
        self._counters["other_than_first"] += best > 0
        for place, inner in enumerate(state.inner):
            if place != best:
                self.engine.close(inner)
        turn = drawn[best]
        state.inner, state.drawn = [turn.session], {}
        state.tokens.extend(turn.token_ids)
        return Turn(session, turn.token_ids, turn.logprobs, turn.stop_reason, turn.entropies)

    def snapshot(self, session: int, length: int | None = None) -> Any:
        state = self._sessions[session]
        return tuple(state.tokens[:length]), self.engine.snapshot(state.inner[0], length)

    def fork(self, session: int, count: int) -> list[int]:
        state = self._sessions[session]
        return [self._add(state.tokens, inner) for inner in self.engine.fork(state.inner[0], count)]

    def close(self, session: int) -> None:
        state = self._sessions.pop(session)
        for inner in state.inner:
            self._of.pop(inner, None)
            self.engine.close(inner)
