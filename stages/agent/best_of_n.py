"""Best of n actions: an engine wrapper that draws n turns for each request and continues with the best one.

Rollouts are unaware of it. The first draw uses the request's key: with n = 1 the turns equal those of the wrapped engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stages.agent.active_episode import EpisodeRequest
from stages.agent.rollout import Labels, turn_key
from stages.agent.wrapped_engine import WrappedEngine
from stages.engine.engine import Engine, Pause, Sampling, Turn
from stages.records.episode import Episode
from stages.seeding import key64

Same = Callable[[Sequence[int]], str]
"""Tokens of a turn -> a string that is equal for equal actions."""


class Ranking(Protocol):
    """Scores the A different actions that were drawn."""

    def __call__(self, history: Sequence[int], turns: Sequence[Turn]) -> Sequence[float]:
        """A scores, higher is better, that depend only on history and turns."""
        ...


def by_logprob(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
    """The policy's own log-probability of each turn, under the sampled distribution."""
    return [sum(turn.logprobs) for turn in turns]


def by_scorer(scorer: Any) -> Ranking:
    """The scores of a `stages.values.q_model.ActionScorer`."""

    def rank(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
        return scorer.scores(history, [turn.token_ids for turn in turns]).tolist()

    return rank


def per_token(rank: Ranking) -> Ranking:
    """`rank` with scores divided by the turn's number of tokens."""

    def ranked(history: Sequence[int], turns: Sequence[Turn]) -> list[float]:
        scores = rank(history, turns)
        return [score / max(1, len(turn.token_ids)) for score, turn in zip(scores, turns, strict=True)]

    return ranked


def choose(history: Sequence[int], turns: Sequence[Turn], rank: Ranking | None, same: Same) -> int:
    """Index of the best turn; without `rank`, of the most frequent action. Turns with the same action are represented by the
    first; ties go to the turn with the higher log-probability, then to the first. A turn without tokens (no room) is chosen only
    if there is no other."""
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
    """A caller's session. `inner`: the wrapped engine's session, or those of all draws while a turn is drawn; `n`, `rank`: how
    the next turn is chosen."""

    tokens: list[int]
    inner: list[int]
    n: int
    rank: Ranking | None
    drawn: dict[int, Turn] = field(default_factory=dict)
    key: int = 0
    """Of the turn in progress."""


def _check_draws(n: int) -> None:
    if n < 1:
        raise ValueError(f"best of {n} actions; at least 1 must be drawn")


class BestOfEngine(WrappedEngine[_Session]):
    """An `Engine` over another one that draws `n` turns per request and keeps the best by `rank`, or by majority vote if that is
    None. Raises ValueError for n below 1."""

    def __init__(
        self, engine: Engine, n: int, rank: Ranking | None, same: Same, on_rejected: Callable[[int, int], None] | None = None
    ) -> None:
        """`on_rejected` is called after each turn with its key and the number of tokens in the draws that were not chosen."""
        _check_draws(n)
        super().__init__(engine)
        self.n, self.rank, self.same, self.on_rejected = n, rank, same, on_rejected
        self._counters = {"decisions": 0, "other_than_first": 0}

    @property
    def counters(self) -> dict[str, int]:
        """The engine's, with `decisions` (turns with more than one draw) and `other_than_first` (decisions against the first
        draw)."""
        return {**self.engine.counters, **self._counters}

    def _add_session(self, tokens: Sequence[int], inner: int) -> int:
        return self._add(_Session(list(tokens), [inner], self.n, self.rank))

    def choose_by(self, session: int, n: int, rank: Ranking | None) -> None:
        """Set `n` and `rank` for the session's next turns. Raises ValueError for n below 1."""
        _check_draws(n)
        state = self._sessions[session]
        state.n, state.rank = n, rank

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        tokens, inner = prefix if prefix is not None else ((), None)
        return self._add_session([*tokens, *token_ids], self.engine.open(token_ids, inner))

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        state = self._sessions[session]
        self.engine.extend(state.inner[0], token_ids)
        state.tokens.extend(token_ids)

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        state = self._sessions[session]
        state.key = key
        if state.n > 1:
            state.inner += self.engine.fork(state.inner[0], state.n - 1)
        for place, inner in enumerate(state.inner):
            self._outer[inner] = session
            self.engine.request(inner, key if place == 0 else key64(key, "best_of", place), sampling)

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        turns: list[Turn] = []
        while not turns and self._outer and not (pause and pause()):
            complete = set()
            for turn in self.engine.advance(pause):
                session = self._outer.pop(turn.session)
                state = self._sessions[session]
                state.drawn[turn.session] = turn
                if len(state.drawn) == len(state.inner):
                    complete.add(session)
            turns = [self._decide(session) for session in sorted(complete)]
        return turns

    def _decide(self, session: int) -> Turn:
        """Continue a session, all of whose draws are finished, with the best one."""
        state = self._sessions[session]
        drawn = [state.drawn[inner] for inner in state.inner]
        best = choose(state.tokens, drawn, state.rank, self.same) if state.n > 1 else 0
        self._counters["decisions"] += state.n > 1
        self._counters["other_than_first"] += best > 0
        for place, inner in enumerate(state.inner):
            if place != best:
                self.engine.close(inner)
        turn = drawn[best]
        if self.on_rejected:
            self.on_rejected(state.key, sum(len(one.token_ids) for one in drawn) - len(turn.token_ids))
        state.inner, state.drawn = [turn.session], {}
        state.tokens.extend(turn.token_ids)
        return replace(turn, session=session)

    def snapshot(self, session: int, length: int | None = None) -> Any:
        state = self._sessions[session]
        return tuple(state.tokens[:length]), self.engine.snapshot(state.inner[0], length)

    def fork(self, session: int, count: int) -> list[int]:
        state = self._sessions[session]
        return [self._add_session(state.tokens, inner) for inner in self.engine.fork(state.inner[0], count)]

    def close(self, session: int) -> None:
        for inner in self._sessions.pop(session).inner:
            self._close_inner(inner)


def tokens_not_played(
    episodes: Sequence[Episode], requests: Sequence[EpisodeRequest], labels: Labels, rejected: Mapping[int, int]
) -> dict[str, dict[str, int]]:
    """Episode -> `tokens` of the draws that were not chosen at its turns, from what `on_rejected` reported; {} if nothing was."""
    numbers = {request.episode_id: request.attempt for request in requests}
    found = {}
    for one in episodes if rejected else ():
        keys = [turn_key(labels, one.task_id, numbers[one.episode_id], turn) for turn in range(len(one.turns))]
        found[one.episode_id] = {"tokens": sum(rejected[key] for key in keys)}
    return found
