"""Plays the contract of an RL method through (see card.py)."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from stages.algorithms.card import Composition
from stages.algorithms.registry import composition
from stages.records.card import Card
from stages.runtime.checking import Findings, expect
from stages.runtime.validation import Section

if TYPE_CHECKING:
    from stages.algorithms.algorithm import Algorithm
    from stages.algorithms.batch import TrajectoryBatch

GROUPS, SIZE, LENGTH = 3, 2, 4
"""The batch that is tried: groups, episodes of each, policy tokens of each."""


def check(name: str, found: Findings) -> None:
    """Raises ParamsError for a name that is unknown, and for a module that is no method."""
    from stages.algorithms.algorithm import resolve
    from stages.algorithms.settings import Rl

    method = composition(name)
    at = next(iter(method.pieces.values()), method.settings or Composition)
    found.check("card: whole, its slug the method's name", at, lambda: _card(name, method))
    found.check("settings: None or a Section, unknown keys refused", method.settings or at, lambda: _settings(method))
    algorithm = found.check("composition: its parts and pieces fit", at, lambda: resolve(Rl(algorithm=name, group_size=SIZE)))
    if algorithm is None or method.data != "episodes":
        return
    if algorithm.needs_critic or algorithm.needs_turn_critic or algorithm.needs_vocabulary or algorithm.needs_progress:
        found.kept.append("pieces: not played here, since they need values that other models give")
        return
    prepared = found.check(
        "pieces: a batch whose advantages are finite and 0 off the mask", at, lambda: _prepared(algorithm, method)
    )
    if prepared is None:
        return
    loss = method.pieces.get("loss", at)
    gradient = found.check("loss: a finite gradient, none off the mask", loss, lambda: _gradient(algorithm, prepared, 1))
    if gradient is not None and not algorithm.whole_groups:
        found.check("loss: the same gradient in micro-batches", loss, lambda: _close(gradient, _gradient(algorithm, prepared, 2)))
    if gradient is not None:
        found.check("pieces: the order of the groups' rows changes nothing", at, lambda: _reordered(algorithm, gradient))


def _card(name: str, method: Composition) -> None:
    expect(isinstance(method.card, Card), "`card` must be a stages.plugins.Card")
    empty = [field.name for field in fields(method.card) if not getattr(method.card, field.name)]
    expect(not empty, f"the card lacks {', '.join(empty)}")
    expect(method.card.slug == name, f"its slug is {method.card.slug!r}; set it to the method's name, {name!r}")


def _settings(method: Composition) -> None:
    if method.settings is None:
        return
    expect(
        isinstance(method.settings, type) and issubclass(method.settings, Section), "make it a subclass of stages.plugins.Section"
    )
    try:
        method.settings(no_such_key=1)  # type: ignore[call-arg]
    except ValueError:
        return
    expect(False, "it takes unknown keys; leave `extra` forbidden")


def _batch() -> TrajectoryBatch:
    """Groups of two episodes in one turn; a prompt token, then policy tokens. Returns differ in two groups of three."""
    import torch

    from stages.algorithms.batch import ENDED, StepKeys, TrajectoryBatch
    from stages.algorithms.parts.advantage import GreedyReturns

    count, width = GROUPS * SIZE, 1 + LENGTH
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(count, width, dtype=torch.bool)
    mask[:, 0] = False
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    own = torch.arange(count)[:, None]
    return TrajectoryBatch(
        token_ids=torch.randint(0, 16, (count, width), generator=generator),
        lengths=torch.full((count,), width),
        mask=mask,
        turn=torch.where(mask, 0, -1),
        logprobs_old=-torch.rand(count, width, generator=generator) * mask,
        logprobs_ref=-torch.rand(count, width, generator=generator) * mask,
        group=torch.arange(GROUPS).repeat_interleave(SIZE),
        rewards=rewards,
        turn_rewards=rewards[:, None],
        turns=torch.ones(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
        overlong=torch.zeros(count, dtype=torch.bool),
        success=rewards >= 1,
        accepted=torch.ones(count, 1, dtype=torch.bool),
        tool_calls=torch.zeros(count),
        tools=torch.zeros(count, dtype=torch.int64),
    ).with_extra(
        GreedyReturns(torch.zeros(count)),
        StepKeys(torch.cat([own, torch.full_like(own, ENDED)], 1), own, own, tuple(map(str, range(count)))),
    )


def _prepare(algorithm: Algorithm, batch: TrajectoryBatch) -> TrajectoryBatch:
    return algorithm.prepare(algorithm.resample(algorithm.shape(batch), "check"))


def _prepared(algorithm: Algorithm, method: Composition) -> TrajectoryBatch:
    from stages.algorithms.batch import TrajectoryBatch

    for part in ("reward", "group_resampling", "advantage", "credit"):
        if part in method.pieces and part == "advantage":
            made = method.pieces[part](algorithm.shape(_batch()), algorithm.rl)
            kind = type(made).__name__
            expect(isinstance(made, TrajectoryBatch), f"piece {part} returned {kind}; return batch.with_(advantages=...)")
    batch = _prepare(algorithm, _batch())
    advantages: Any = batch.advantages
    expect(advantages is not None, "no advantages are set; return batch.with_(advantages=...)")
    expect(
        advantages.shape == batch.mask.shape, f"advantages are {list(advantages.shape)}, not [B, T] = {list(batch.mask.shape)}"
    )
    expect(bool(advantages.isfinite().all()), "advantages are not finite")
    expect(not bool((advantages * ~batch.mask).any()), "advantages are not 0 off the mask; multiply them by batch.mask")
    return batch


def _gradient(algorithm: Algorithm, batch: TrajectoryBatch, parts: int) -> Any:
    """Of the loss by the log-probabilities, [B, T]; summed over `parts` micro-batches."""
    import torch

    from stages.algorithms.parts.loss import denominators

    logprobs = (batch.logprobs_old * 0.9).requires_grad_()
    total = denominators(batch, LENGTH)
    for rows in torch.arange(batch.size).chunk(parts):
        entropy = torch.zeros_like(logprobs[rows])
        algorithm.loss(logprobs[rows], entropy, batch.rows(rows), total).loss.backward()
    gradient: Any = logprobs.grad
    expect(bool(gradient.isfinite().all()), "the gradient is not finite")
    expect(not bool((gradient * ~batch.mask).any()), "tokens off the mask have a gradient; multiply the loss by batch.mask")
    return gradient


def _close(one: Any, two: Any) -> None:
    import torch

    expect(torch.allclose(one, two, atol=1e-6), "the gradients differ; take denominators over the whole batch")


def _reordered(algorithm: Algorithm, gradient: Any) -> None:
    import torch

    order = torch.arange(GROUPS * SIZE).flip(0)
    _close(gradient[order], _gradient(algorithm, _prepare(algorithm, _batch().rows(order)), 1))
