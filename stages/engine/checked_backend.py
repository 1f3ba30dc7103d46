"""A back end wrapper that checks the first turns' log-probabilities against the policy's own weights.

A remote back end's log-probabilities can be silently wrong: another model under the same name, another precision, or those of
the raw distribution instead of the sampled one (after temperature, top-k and top-p).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from stages.engine.completion_engine import Backend, TurnRequest, TurnResult
from stages.engine.engine import EngineError, Pause, Sampling
from stages.engine.sampling import distribution

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference in nats, by resources.precision, since kernels and batches differ between back ends. Our choice."""


@torch.inference_mode()
def sampled_logprobs(model: Any, before: tuple[int, ...], drawn: tuple[int, ...], sampling: Sampling) -> list[float]:
    """Log-probability of each token of `drawn` after `before` under the distribution of `sampling`, in float64."""
    ids = torch.tensor([[*before, *drawn]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1]
    rows = torch.ones(len(drawn), dtype=torch.float64, device=logits.device)
    settings = (rows * sampling.temperature, rows * sampling.top_p, rows.long() * sampling.top_k)
    return distribution(logits, *settings).logprobs(ids[0, len(before) :]).tolist()


class CheckedBackend:
    """Compares the first `turns` turns of `backend` with the model of `load_model()`. Raises EngineError if they differ."""

    def __init__(self, backend: Backend, load_model: Callable[[], Any], turns: int, precision: str) -> None:
        self.backend, self._load, self.turns, self.precision = backend, load_model, turns, precision
        self._requests: dict[int, TurnRequest] = {}
        self._model: Any = None
        self._differences: list[float] = []
        self._refused = ""
        """The failed check's message."""

    def start(self, request: TurnRequest) -> None:
        if self._refused:
            raise EngineError(self._refused)
        if self.turns:
            self._requests[request.session] = request
        self.backend.start(request)

    def wait(self, pause: Pause | None = None) -> list[TurnResult]:
        results = self.backend.wait(pause)
        for result in sorted(results, key=lambda result: result.session):
            if self.turns:
                self._check(self._requests.pop(result.session), result)
        return results

    def cancel(self, sessions: Collection[int]) -> None:
        for session in sessions:
            self._requests.pop(session, None)
        self.backend.cancel(sessions)

    def close(self) -> None:
        self.backend.close()

    def _check(self, request: TurnRequest, result: TurnResult) -> None:
        if self._model is None:
            self._model = self._load()
        expected = sampled_logprobs(self._model, request.token_ids, result.token_ids, request.sampling)
        self._differences += [abs(ours - theirs) for ours, theirs in zip(expected, result.logprobs, strict=True)]
        self.turns -= 1
        if self.turns:
            return
        self._model, self._requests = None, {}
        mean = sum(self._differences) / len(self._differences)
        if not mean <= TOLERANCE[self.precision]:  # true for NaN
            self._refused = (
                f"the back end's log-probabilities differ from the policy's by {mean:.3g} nats on average (tolerance "
                f"{TOLERANCE[self.precision]:g} in {self.precision}; {len(self._differences)} tokens). It serves other weights, "
                "uses a precision other than resources.precision, or returns log-probabilities of the raw distribution: start "
                "vLLM's server with --logprobs-mode processed_logprobs, or sample with temperature 1, top_p 1 and top_k 0"
            )
            raise EngineError(self._refused)
