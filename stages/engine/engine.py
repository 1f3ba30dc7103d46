"""The generation engine's contract: tokens in, tokens and log-probabilities out, for many episodes at once.

A *session* is one growing token sequence with its key/value cache. Callers open sessions, feed environment tokens, ask for
turns and advance the engine until turns come back; finished sessions are closed and their places are taken by waiting ones.
Back ends, chosen by `resources.engine` in stages.agent.player: `torch_engine` (default), `vllm_engine`, `openai_engine`. The
torch engine draws with counter-based random numbers, so that a turn depends on its key and its tokens alone; the others are given
a seed per turn, and what that is worth their modules say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

MIN_TEMPERATURE = 1e-3
"""Lowest temperature above 0 (greedy): logits divided by much less are no finite numbers."""
MAX_COUNT = 2**31 - 1
"""Most that top_k, candidates and max_tokens may be: they are stored in 32 bits."""
Pause = Callable[[], bool]
"""Asked between steps, from the engine's thread: whether to return before a turn is finished."""


class EngineError(ValueError):
    """A back end is not there or does not give what is needed; the message says what and what to do."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probabilities are those of the distribution that is sampled from (after temperature and the
    top-k / top-p support). `temperature` 0 is greedy; its log-probabilities are those at temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 24
    candidates: int = 0
    """Above 0: turns come with the entropy before each token, over this many most likely ones. Not every back end can."""

    def __post_init__(self) -> None:
        warm = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf")
        counts = (self.top_k, self.candidates, self.max_tokens)
        if not warm or not 0 < self.top_p <= 1 or min(counts) < 0 or max(counts) > MAX_COUNT or self.max_tokens < 1:
            raise ValueError(
                f"bad sampling {self}: temperature 0 or at least {MIN_TEMPERATURE:g}, 0 < top_p <= 1, max_tokens >= 1, "
                f"top_k >= 0 and candidates >= 0, these at most {MAX_COUNT}"
            )


@dataclass(frozen=True)
class Turn:
    """One finished turn of a session. `token_ids` ends with the end-of-turn token unless `stop_reason` is "length"."""

    session: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str
    """"stop" (end-of-turn token), "length" (max_tokens) or "context" (the model's context is full)."""
    entropies: tuple[float, ...] = ()
    """Where `Sampling.candidates` asked for them: -sum p log p over the most likely tokens, not renormalised, in nats."""


@runtime_checkable
class Engine(Protocol):
    """Sessions are numbered by the engine; numbers are never reused. All methods raise KeyError for a closed session."""

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        """A new session holding `token_ids`. With `prefix` (from `snapshot`), `token_ids` come after it; they may be empty."""
        ...

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        """Append tokens the policy did not choose (an observation)."""
        ...

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        """Ask for one turn. `key` (seeding.key64) and the token's index in the turn fix the random draws (or the seed)."""
        ...

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        """Run until at least one requested turn is finished, or until `pause` says so; the finished ones in session order, [] if
        there is none. The next call goes on."""
        ...

    def snapshot(self, session: int, length: int | None = None) -> Any:
        """An immutable copy of a session's tokens and cache, or of its first `length` tokens, to be opened again any number of
        times (fork). Raises ValueError for a length that it does not have."""
        ...

    def fork(self, session: int, count: int) -> list[int]:
        """`count` new sessions that continue from a copy of this one (which stays open)."""
        ...

    def close(self, session: int) -> None: ...

    @property
    def counters(self) -> dict[str, int]:
        """Totals so far: sampled_tokens, fed_tokens (prompt and observation), forked_tokens; forward_passes where they run here,
        requests where they do not."""
        ...
