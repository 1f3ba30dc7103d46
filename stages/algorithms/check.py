"""Runs a method through its contract on a small batch of random numbers (see card.py), whatever it learns from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
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
"""The batch: groups, episodes per group, policy tokens per episode."""


def check(name: str, found: Findings) -> None:
    """Raises ParamsError for a name that is unknown, and for a module that is no method."""
    from stages.algorithms.algorithm import resolve
    from stages.algorithms.settings import Rl

    method = composition(name)
    at = next(iter(method.pieces.values()), method.offline.policy if method.offline else method.settings or Composition)
    found.check("card: complete, its slug the method's name", at, lambda: _card(name, method))
    found.check("settings: None or a Section, unknown keys refused", method.settings or at, lambda: _settings(method))
    rl = Rl(algorithm=name, group_size=SIZE)
    algorithm = found.check("composition: its parts and pieces are valid", at, lambda: resolve(rl, 1 + LENGTH))
    if algorithm is None:
        return
    if method.data == "pairs":
        found.check("preference: one finite loss per pair, with a finite gradient", at, lambda: _pairs(algorithm))
    elif method.data == "offline":
        _check_offline(algorithm, found)
    elif method.data not in ("paths", "attempts"):
        _check_pieces(algorithm, at, found)


def _check_pieces(algorithm: Algorithm, at: Any, found: Findings) -> None:
    prepared = found.check("pieces: advantages are finite, and 0 off the mask", at, lambda: _prepared(algorithm))
    if prepared is None:
        return
    loss = algorithm.method.pieces.get("loss", at)
    gradient = found.check("loss: a finite gradient, 0 off the mask", loss, lambda: _gradient(algorithm, prepared, 1))
    if gradient is None:
        return
    if not algorithm.whole_groups:
        found.check("loss: the same gradient in micro-batches", loss, lambda: _close(gradient, _gradient(algorithm, prepared, 2)))
    found.check("pieces: the order of rows does not matter", at, lambda: _reordered(algorithm, gradient))
    if algorithm.method.state is not None:
        found.check("state: tensors and JSON values", at, lambda: _state(algorithm))


def _card(name: str, method: Composition) -> None:
    expect(isinstance(method.card, Card), "`card` must be a stages.plugins.Card")
    empty = [field.name for field in fields(method.card) if not getattr(method.card, field.name)]
    expect(not empty, f"the card lacks {', '.join(empty)}")
    expect(method.card.slug == name, f"its slug is {method.card.slug!r}; set it to the method's name, {name!r}")


def _settings(method: Composition) -> None:
    if method.settings is None:
        return
    is_section = isinstance(method.settings, type) and issubclass(method.settings, Section)
    expect(is_section, "make it a subclass of stages.plugins.Section")
    try:
        method.settings(no_such_key=1)  # type: ignore[call-arg]
    except ValueError:
        return
    expect(False, "it accepts unknown keys; do not change pydantic's `extra`")


def _random(*shape: int) -> Any:
    import torch

    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _batch() -> TrajectoryBatch:
    """Groups of two episodes of one turn: a prompt token, then policy tokens. Returns differ in two of three groups."""
    import torch

    from stages.algorithms.batch import ENDED, Costs, StepKeys, TrajectoryBatch, TurnTerms, TurnWords
    from stages.algorithms.parts.advantage import GreedyReturns
    from stages.algorithms.parts.credit import StepValues
    from stages.algorithms.parts.loss import MeanLogprobs
    from stages.algorithms.parts.progress import Progress
    from stages.algorithms.parts.reward import EpisodeRewards
    from stages.algorithms.parts.teacher import Teacher
    from stages.algorithms.parts.team_gae import TeamMoves
    from stages.algorithms.parts.turn_critic import TurnCritic
    from stages.records.task import JUDGMENT_TERMS

    count, width = GROUPS * SIZE, 1 + LENGTH
    mask = torch.ones(count, width, dtype=torch.bool)
    mask[:, 0] = False
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    own = torch.arange(count)[:, None]
    judgments = torch.eye(len(JUDGMENT_TERMS)).repeat(2, 1)[:count]
    return TrajectoryBatch(
        token_ids=(16 * _random(count, width)).long(),
        lengths=torch.full((count,), width),
        mask=mask,
        turn=torch.where(mask, 0, -1),
        logprobs_old=-_random(count, width) * mask,
        logprobs_ref=-_random(width, count).T * mask,
        values=_random(count, width) * mask,
        group=torch.arange(GROUPS).repeat_interleave(SIZE),
        task_ids=tuple(f"task {row // SIZE}" for row in range(count)),
        rewards=rewards,
        turn_rewards=rewards[:, None],
        turns=torch.ones(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
        overlong=torch.zeros(count, dtype=torch.bool),
        success=rewards >= 1,
        accepted=torch.ones(count, 1, dtype=torch.bool),
        tool_calls=torch.zeros(count),
        tools=torch.zeros(count, dtype=torch.int64),
        terms={
            **dict(zip(JUDGMENT_TERMS, judgments.T, strict=True)),
            "well_formed": torch.ones(count),
            "exact_match": rewards,
            "format_graded": _random(count),
        },
    ).with_extra(
        Costs(100 * _random(count)),
        GreedyReturns(torch.zeros(count)),
        MeanLogprobs(-4 * _random(count, width) * mask),
        EpisodeRewards(rewards),
        Progress(_random(count, 1)),
        StepKeys(torch.cat([own, torch.full_like(own, ENDED)], 1), own, own, tuple(f"state {row}" for row in range(count))),
        StepValues(_random(count, 2)),
        Teacher(-_random(count, width) * mask, mask),
        TeamMoves(torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.zeros(count, 1, dtype=torch.int64)),
        TurnTerms(JUDGMENT_TERMS, judgments[:, None]),
        TurnCritic(_random(count, 1, 2), _random(count, 2, 1).mT),
        TurnWords(torch.ones(count, 1)),
    )


def _prepare(algorithm: Algorithm, batch: TrajectoryBatch) -> TrajectoryBatch:
    """As in training, with a new state."""
    state = algorithm.method.state
    algorithm = replace(algorithm, state=state() if state else {}, costs={})
    return algorithm.prepare(algorithm.resample(algorithm.shape(batch), "check"))


def _prepared(algorithm: Algorithm) -> TrajectoryBatch:
    from stages.algorithms.batch import TrajectoryBatch

    pieces = dict(algorithm.method.pieces)

    def checked(name: str, piece: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            made = piece(*given)
            kind = type(made).__name__
            expect(isinstance(made, TrajectoryBatch), f"piece {name} returned {kind}; return batch.with_(...)")
            return made

        return run

    for name in {"reward", "group_resampling", "advantage", "credit"} & set(pieces):
        pieces[name] = checked(name, pieces[name])
    batch = _prepare(replace(algorithm, method=replace(algorithm.method, pieces=pieces)), _batch())
    advantages: Any = batch.advantages
    expect(advantages is not None, "no advantages are set; return batch.with_(advantages=...)")
    shape = list(batch.mask.shape)
    expect(list(advantages.shape) == shape, f"advantages are {list(advantages.shape)}, not [B, T] = {shape}")
    expect(bool(advantages.isfinite().all()), "advantages are not finite")
    expect(not bool((advantages * ~batch.mask).any()), "advantages are not 0 off the mask; multiply them by batch.mask")
    return batch


def _gradient(algorithm: Algorithm, batch: TrajectoryBatch, parts: int) -> Any:
    """Of the loss with respect to the log-probabilities, [B, T]; summed over `parts` micro-batches."""
    import torch

    from stages.agent.logprobs import Vocabulary
    from stages.algorithms.parts.loss import denominators

    logprobs = (batch.logprobs_old * 0.9).requires_grad_()
    total = denominators(batch, LENGTH)
    for rows in torch.arange(batch.size).chunk(parts):
        micro = batch.rows(rows)
        vocabulary = Vocabulary(-3.0 * micro.mask, 1.0 * micro.mask)
        algorithm.loss(logprobs[rows], torch.zeros_like(logprobs[rows]), micro, total, vocabulary).loss.backward()
    gradient: Any = logprobs.grad
    expect(bool(gradient.isfinite().all()), "the gradient is not finite")
    expect(not bool((gradient * ~batch.mask).any()), "tokens off the mask have a gradient; multiply the loss by batch.mask")
    return gradient


def _close(one: Any, two: Any) -> None:
    import torch

    expect(torch.allclose(one, two, atol=1e-6), "the gradients differ; compute denominators over the whole batch")


def _reordered(algorithm: Algorithm, gradient: Any) -> None:
    import torch

    order = torch.arange(GROUPS * SIZE).flip(0)
    _close(gradient[order], _gradient(algorithm, _prepare(algorithm, _batch().rows(order)), 1))


def _state(algorithm: Algorithm) -> None:
    import torch

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            expect(all(isinstance(key, (str, int)) for key in value), "a key is neither text nor a whole number")
            value = list(value.values())
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, (dict, list, tuple)):
                walk(one)
            else:
                known = one is None or isinstance(one, (bool, int, float, str, torch.Tensor))
                expect(known, f"it has a {type(one).__name__}, which checkpoints refuse; use numbers, text, lists and tensors")

    assert algorithm.method.state is not None
    state = algorithm.method.state()
    walk(state)
    current = replace(algorithm, state=state)
    current.prepare(current.resample(current.shape(_batch()), "check"))
    walk(state)


def _pairs(algorithm: Algorithm) -> None:
    from stages.algorithms.parts.preference import LOSSES, PairScores

    rl, count = algorithm.rl, GROUPS
    win, lose = (-LENGTH * _random(count, one)[:, 0] for one in (1, 2))
    win, lose = win.requires_grad_(), lose.requires_grad_()
    tokens = win.detach() * 0 + LENGTH
    pairs = PairScores(win, lose, win.detach() - 0.1, lose.detach() + 0.2, tokens, tokens, tokens * 0 + 1, tokens * 0)
    own = rl.preference.loss == "own"
    losses = algorithm.method.pieces["preference"](pairs, rl) if own else LOSSES[rl.preference.loss](pairs, rl.preference)
    expect(list(losses.shape) == [count], f"the loss is {list(losses.shape)}, not [P] = [{count}]")
    losses.sum().backward()
    expect(bool(losses.isfinite().all()), "the loss is not finite")
    expect(win.grad is not None or lose.grad is not None, "neither winner nor loser has a gradient")
    for gradient in (win.grad, lose.grad):
        expect(gradient is None or bool(gradient.isfinite().all()), "the gradient is not finite")


def _check_offline(algorithm: Algorithm, found: Findings) -> None:
    losses = algorithm.method.offline
    if losses is None:
        found.mistakes.append(f"{algorithm.card.slug}: data is `offline`, and `offline` is None; set it to OfflineLosses(...)")
        return
    _check_offline_loss("policy", losses.policy, algorithm, found)
    if losses.value is not None:
        _check_offline_loss("value", losses.value, algorithm, found)


def _check_offline_loss(name: str, loss: Callable[..., Any], algorithm: Algorithm, found: Findings) -> None:
    gradient = found.check(f"{name} loss: a finite gradient, 0 off the mask", loss, lambda: _offline(algorithm, loss, 1))
    if gradient is not None:
        split = f"{name} loss: the same gradient in micro-batches"
        found.check(split, loss, lambda: _close(gradient, _offline(algorithm, loss, 2)))


def _offline(algorithm: Algorithm, loss: Callable[..., Any], parts: int) -> Any:
    """Gradient of the loss with respect to the networks' scores, [5, B, T]; summed over `parts` micro-batches."""
    import torch

    from stages.algorithms.batch import LossTerms
    from stages.algorithms.parts.offline import OfflineBatch, Scores

    played = _batch()
    count, real = played.size, torch.arange(played.size) % 2 == 0
    batch = OfflineBatch(
        token_ids=played.token_ids,
        mask=played.mask,
        rewards=torch.nn.functional.pad(played.turn_rewards, (LENGTH, 0)),
        real=real,
        baseline=torch.full((count,), 0.5),
        weight=torch.full((count,), 1 / LENGTH / count),
        real_weight=real / LENGTH / real.sum(),
        logprobs_ref=played.logprobs_old,
        best_ref=played.logprobs_old * 0.5,
        greedy=played.token_ids,
    )
    given = torch.stack([played.logprobs_old * factor for factor in (0.9, 0.4, 0.8, -1.0, 0.1)]).requires_grad_()
    for rows in torch.arange(count).chunk(parts):
        terms = loss(Scores(*given[:, rows]), batch.rows(rows), algorithm.rl)
        expect(isinstance(terms, LossTerms), f"it returned {type(terms).__name__}; return stages.plugins.LossTerms")
        terms.loss.backward()
    gradient: Any = given.grad
    expect(bool(gradient.isfinite().all()), "the gradient is not finite")
    expect(not bool((gradient * ~batch.mask).any()), "tokens off the mask have a gradient; sum losses over batch.mask alone")
    return gradient
