"""The generation engine's contract: tokens in, tokens and log-probabilities out, for many episodes at once.

A *session* is one growing token sequence with its key/value cache. Callers open sessions, feed environment tokens, request turns
and advance the engine until turns are finished; waiting sessions take the slots of closed ones. `resources.engine` selects the
back end (stages.agent.player): `torch_engine` (default), `vllm_engine` or `openai_engine`. The torch engine draws with
counter-based random numbers, so that a turn depends only on its key and its tokens; the others receive a seed per turn, and
their modules document how far that reproduces a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from stages.records.thinking import Thinking
    from stages.runtime.resources import Resources

MIN_TEMPERATURE = 1e-3
"""Lowest temperature above 0 (greedy): with much less, logits / temperature overflows."""
MAX_COUNT = 2**31 - 1
"""Upper bound of top_k, candidates and max_tokens, which are stored in 32 bits."""
Pause = Callable[[], bool]
"""Called between steps in the engine's thread; True makes `advance` return before a turn is finished."""


class EngineError(ValueError):
    """A back end is unavailable or lacks a required feature."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probabilities are those of the sampled distribution (after temperature, top-k and top-p).
    `temperature` 0 is greedy, with log-probabilities at temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 24
    candidates: int = 0
    """Above 0: return the entropy before each token over this many most likely tokens (torch engine only)."""
    kept: bool = False
    """Return the tokens that top-k and top-p leave before each token, over which a training pass then renormalises (torch engine
    only)."""

    @property
    def restricted(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    def __post_init__(self) -> None:
        valid_temperature = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf")
        counts = (self.top_k, self.candidates, self.max_tokens)
        if not valid_temperature or not 0 < self.top_p <= 1 or min(counts) < 0 or max(counts) > MAX_COUNT or self.max_tokens < 1:
            raise ValueError(
                f"bad sampling {self}: temperature 0 or at least {MIN_TEMPERATURE:g}, 0 < top_p <= 1, max_tokens >= 1, "
                f"top_k >= 0 and candidates >= 0, these at most {MAX_COUNT}"
            )


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a back end: fields of `resources` and `resources.engine`, and of `model`."""

    max_length: int
    device: str
    precision: str
    slots: int
    kind: str
    base_url: str
    dialect: str
    text: bool
    requests: int
    check_turns: int
    gpu_memory: float
    thinking: Thinking | None = None
    """Marks of the policy's thoughts, `model.thinking`."""

    @classmethod
    def of(cls, resources: Resources, max_length: int, thinking: Thinking | None = None) -> EngineSettings:
        shared = {name: getattr(resources, name) for name in ("device", "precision", "slots")}
        return cls(max_length, **shared, **resources.engine.model_dump(), thinking=thinking)


@dataclass(frozen=True)
class Turn:
    """One finished turn of a session. `token_ids` ends with the end-of-turn token unless `stop_reason` is "length"."""

    session: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str
    """"stop" (end-of-turn token), "length" (max_tokens) or "context" (the model's context is full)."""
    entropies: tuple[float, ...] = ()
    """With `Sampling.candidates`: -sum p log p over the most likely tokens, not renormalised, in nats."""
    kept: tuple[tuple[int, ...], ...] = ()
    """With `Sampling.kept`, where it is restricted: per token, the ids that it was drawn from, ascending."""
    owners: tuple[int, ...] = ()
    """Per token, who wrote it (`stages.records.episode.Owner`); empty: the policy wrote all. Log-probabilities of tokens that it
    did not draw are 0."""


@runtime_checkable
class Engine(Protocol):
    """Session ids are never reused. All methods raise KeyError for a closed session."""

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        """Open a session holding `token_ids`, appended to `prefix` (from `snapshot`) if given; they may then be empty."""
        ...

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample (an observation)."""
        ...

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        """Request one turn. `key` (seeding.key64) and the token's index in the turn determine the random draws (or the seed)."""
        ...

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        """Run until at least one requested turn is finished or `pause` returns True; return finished turns in session order. The
        next call continues."""
        ...

    def snapshot(self, session: int, length: int | None = None) -> Any:
        """An immutable copy of a session's tokens and cache, or of its first `length` tokens, for `open`. Raises ValueError if
        the session is shorter."""
        ...

    def fork(self, session: int, count: int) -> list[int]:
        """Open `count` sessions that continue from a copy of this one, which stays open."""
        ...

    def close(self, session: int) -> None: ...

    @property
    def counters(self) -> dict[str, int]:
        """Totals so far: sampled_tokens, fed_tokens (prompt and observation), forked_tokens; forward_passes of the torch engine,
        requests of other back ends."""
        ...


class OpenSession(Protocol):
    """What a back end knows about a session."""

    sampling: Sampling | None
    """Of the turn in progress; None between turns."""


AnySession = TypeVar("AnySession", bound=OpenSession)


def idle(sessions: Mapping[int, AnySession], session: int) -> AnySession:
    """The open session. Raises RuntimeError during a turn."""
    state = sessions[session]
    if state.sampling is not None:
        raise RuntimeError(f"session {session} is in the middle of a turn; wait until advance() returns it")
    return state


def check_length(tokens: int, max_length: int) -> None:
    """Raise ValueError if a session of this many tokens can't be opened."""
    if not 0 < tokens <= max_length:
        raise ValueError(f"a session of {tokens} tokens; it needs at least 1 and at most max_length = {max_length}")


def check_growth(session: int, tokens: int, more: int, max_length: int) -> None:
    """Raise ValueError if a session can't be extended by `more` tokens."""
    if tokens + more > max_length:
        raise ValueError(f"session {session} has {tokens} tokens; {more} more exceed max_length = {max_length}")


def check_prefix(session: int, tokens: int, length: int | None) -> None:
    """Raise ValueError if a session has no prefix of `length` tokens."""
    if length is not None and not 0 < length <= tokens:
        raise ValueError(f"session {session} has {tokens} tokens; can't copy its first {length}")
