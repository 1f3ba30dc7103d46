"""A back end whose first turns are checked against the policy's own weights, computed here.

Log-probabilities from elsewhere can be wrong in ways that nothing else shows: another model behind the same name, another
precision, or those of the model's raw distribution where temperature, top-k and top-p change the one that is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from stages.engine.completion_engine import Backend, TurnRequest, TurnResult
from stages.engine.engine import EngineError, Pause, Sampling
from stages.engine.sampling import restrict

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference, in nats, by resources.precision: kernels and batches differ between back ends. Our choice."""


@torch.inference_mode()
def sampled_logprobs(model: Any, before: tuple[int, ...], drawn: tuple[int, ...], sampling: Sampling) -> list[float]:
    """Log-probability of each of `drawn` after `before` under the distribution that `sampling` draws from, in float64."""
    ids = torch.tensor([[*before, *drawn]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].double()
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
        rows = torch.ones(len(drawn), device=logits.device)
        logits = restrict(logits, rows.double() * sampling.top_p, rows.long() * sampling.top_k)
    return logits.log_softmax(-1).gather(-1, ids[0, len(before) :, None])[:, 0].tolist()


class CheckedBackend:
    """`backend`, its first `turns` turns compared with what `load_model()` computes. Raises EngineError where they part."""

    def __init__(self, backend: Backend, load_model: Callable[[], Any], turns: int, precision: str) -> None:
        self.backend, self._load, self.turns, self.precision = backend, load_model, turns, precision
        self._requests: dict[int, TurnRequest] = {}
        self._model: Any = None
        self._differences: list[float] = []
        self._refused = ""
        """Why the back end is not to be used: what the check found."""

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
        if not mean <= TOLERANCE[self.precision]:  # also where it is no number
            self._refused = (
                f"the back end's log-probabilities differ by {mean:.3g} nats on average from those of the policy's weights here "
                f"(at most {TOLERANCE[self.precision]:g} in {self.precision}; {len(self._differences)} tokens). Either it serves "
                "other weights or another precision than resources.precision, or it returns those of the raw distribution: "
                "start vLLM's server with --logprobs-mode processed_logprobs, or sample with temperature 1, top_p 1 and top_k 0"
            )
            raise EngineError(self._refused)
