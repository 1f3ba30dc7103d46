"""Compares an engine with the model's own forward pass once, when the engine is created: the torch engine here, the model engine
in its module, by the same rows and tolerance.

An unsupported attention variant would silently change every log-probability. So a few rows of arbitrary tokens, of unequal
length and up to max_length, are fed and decoded as in a rollout, and their hidden states compared with those that training
computes. No random number is drawn, and the cache is left empty.

`rows_that_differ` checks the processor: a row of a matrix product must not depend on how many other rows there are.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from stages.engine.slots import LEAST_ROWS, ROWS, Session

if TYPE_CHECKING:
    from stages.engine.torch_engine import TorchEngine

DECODED = 3
"""Tokens of each row that are decoded one by one; those before are fed."""
FAILURES = (RuntimeError, TypeError, AttributeError, IndexError, KeyError, ValueError)
"""What a model raises that can't be run."""
BOUND = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 0.15}
"""Largest difference between hidden states relative to their norm, by precision: well above rounding errors, and below the effect
of attending to other positions. In float32, tiny models of all families round to at most 5e-6, and a cache that computes another
function is off by 5e-4 (Zamba 2) or more. Our choice."""

COUNTS = (*range(LEAST_ROWS + ROWS, 65, ROWS), 96, 128, 256)
"""Numbers of rows whose products are compared with those of LEAST_ROWS."""
LARGE = 1 << 20
"""Of matrices with more elements, only the first rows are multiplied: kernels are chosen by the inner dimension and the rows."""


def check_against_model(engine: TorchEngine) -> None:
    """Raise ValueError if the engine does not reproduce the model's hidden states."""
    rows = arbitrary_rows(engine.model, engine.max_length, engine.slots)
    with torch.inference_mode(), evaluating(engine.model):
        with naming(engine.model, "does not run by its own forward pass"):
            expected = model_states(engine.model, rows)
        with naming(engine.model, "does not run in the torch engine"):
            difference = _difference(engine, rows, expected)
    bound = tolerance(engine.model)
    if not difference <= bound:  # true for NaN
        raise ValueError(
            f"{model_name(engine.model)}: the torch engine's hidden states differ from those of the model's own forward pass by "
            f"{difference:.2g} of their norm (tolerance {bound:g} in {str(engine.model.dtype).removeprefix('torch.')}, "
            f"rows of up to model.max_length {engine.max_length} tokens), so sampling and training probabilities would differ; "
            f"{ADVICE}"
        )


def warn_of_processor(model: Any) -> None:
    """Print, once per precision and shape, if this processor breaks the promise that results do not depend on
    `resources.workers`; once, if it has no instructions for the model's precision."""
    if model.device.type != "cpu":
        return
    if model.dtype == torch.bfloat16:
        warn_of_bfloat16()
    shapes = {tuple(weight.shape) for weight in model.parameters() if weight.ndim == 2}
    for outputs, inputs in sorted(shapes):
        if counts := rows_that_differ(max(min(outputs, LARGE // inputs), 1), inputs, model.dtype):
            print(
                f"engine: on this processor, products of {LEAST_ROWS} rows with a {outputs} x {inputs} matrix differ in the last "
                f"bits from {', '.join(map(str, counts))} rows: results will depend on resources.workers",
                file=sys.stderr,
            )


@functools.cache
def warn_of_bfloat16() -> None:
    """Print, once, if this processor computes in bfloat16 without instructions for it, which is slower than float32."""
    if platform.machine() in ("x86_64", "AMD64") and not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        print(
            "engine: this processor has neither avx512_bf16 nor amx, so that bfloat16 is slower than float32: set "
            "resources.precision to float32, unless memory is short",
            file=sys.stderr,
        )


@functools.cache
def rows_that_differ(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Those of COUNTS for which the first LEAST_ROWS rows of a product with an [outputs, inputs] matrix are other than if they
    are all. Empty where the processor's library keeps our promise."""
    weight = torch.arange(outputs * inputs, dtype=torch.float32).mul(0.7390851).sin().view(outputs, inputs).to(dtype)
    rows = torch.arange(max(COUNTS) * inputs, dtype=torch.float32).mul(0.5671433).cos().view(-1, inputs).to(dtype)
    few = linear(rows[:LEAST_ROWS], weight)
    return tuple(count for count in COUNTS if not torch.equal(linear(rows[:count], weight)[:LEAST_ROWS], few))


@contextmanager
def naming(model: Any, what: str) -> Iterator[None]:
    """Turn the errors of a model that can't be run into ValueErrors that name it."""
    try:
        yield
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"{model_name(model)} {what} ({error}); {ADVICE}") from error


ADVICE = (
    "set model.path to a causal language model of another architecture, or lower model.max_length if the model's attention span "
    "is shorter"
)


def model_name(model: Any) -> str:
    return f"{type(model).__name__} (model_type {model.config.model_type})"


def tolerance(model: Any) -> float:
    """The largest relative difference between hidden states that counts as rounding."""
    if model.dtype == torch.float32 and model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return BOUND[torch.float16]  # TF32 has its mantissa
    return BOUND.get(model.dtype, BOUND[torch.float32])


def arbitrary_rows(model: Any, longest: int, count: int = 4) -> list[list[int]]:
    """At most `count` different rows of tokens of unequal length, the first of `longest`."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    lengths = [longest, longest - longest // 3, longest // 2, 8][:count]
    return [
        [(7919 * place + 104_729 * row + place * place) % vocabulary for place in range(max(min(length, longest), 1))]
        for row, length in enumerate(lengths)
    ]


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model in evaluation mode, with sdpa attention where available, as in training: its memory is not quadratic."""
    training, attention = model.training, model.config._attn_implementation
    if training:
        model.eval()
    if attention == "eager" and getattr(model, "_supports_sdpa", False):
        model.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        model.config._attn_implementation = attention
        if training:
            model.train()


def model_states(model: Any, rows: list[list[int]]) -> list[Tensor]:
    """The model's hidden states [length, D] of each row, computed one row at a time without padding."""
    ids = (torch.tensor([row], device=model.device) for row in rows)
    return [model.base_model(input_ids=one, use_cache=False).last_hidden_state[0] for one in ids]


def _difference(engine: TorchEngine, rows: list[list[int]], expected: list[Tensor]) -> float:
    """Largest relative difference between the engine's states and `expected` over rows."""
    table = engine.table
    fed = [max(len(tokens) - DECODED, 1) for tokens in rows]
    sessions = [Session(row, tokens[:count], None, 0) for row, (tokens, count) in enumerate(zip(rows, fed, strict=True))]
    found: dict[int, list[Tensor]] = {}
    try:
        for session in sessions:
            table.place(session)
        states = engine._feed(sessions, keep=0)
        found = {session.id: [states[session.id]] for session in sessions}
        for step in range(DECODED):
            left = [session for session in sessions if fed[session.id] + step < len(rows[session.id])]
            table.active[:] = False
            for session in left:
                table.active[session.slot] = True
                table.last[session.slot] = rows[session.id][fed[session.id] + step]
            if left:
                hidden = engine._decode()
                for session in left:
                    found[session.id].append(hidden[session.slot])
            table.position[np.flatnonzero(table.active)] += 1
    finally:
        for row in {session.slot for session in sessions} - {-1} | {engine.cache.slots}:
            engine.cache.clear(row)
        for session in sessions:
            if session.slot >= 0:
                table.last[session.slot] = 0
                table.vacate(session)
    return max(relative_error(torch.stack(states), expected[row][fed[row] - 1 :]) for row, states in found.items())


def relative_error(states: Tensor, expected: Tensor) -> float:
    """Median over positions of |states - expected| / |expected|, both [n, D]. The median tolerates single tokens that rounding
    routes to another expert."""
    expected = expected.float()
    least = torch.finfo(torch.float32).tiny
    return float(((states.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(least)).median())
