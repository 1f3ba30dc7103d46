"""Fits a world model: epochs over the transitions until the validation loss of every member has stopped falling."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.updates import FlatAdam
from stages.control.off_policy.world_model import WorldModel


def fit(
    model: WorldModel,
    optimiser: FlatAdam,
    data: Transitions,
    weights: Tensor | None,
    plain: bool,
    generator: torch.Generator,
) -> Tensor:
    """Train on transitions [B], of which `model` has taken the measure, each member in its own order; keep each member's best
    weights and choose the elites. The best validation losses [M]. weights [K, B, S] and plain: see `WorldModel.loss`."""
    settings = model.settings
    order = torch.randperm(len(data.reward), generator=generator)
    cut = max(1, int(settings.validation * len(order)))
    held_out, rows = order[:cut].expand(settings.members, -1), order[cut:]
    best = torch.full((settings.members,), torch.inf)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    waited = 0
    for _ in range(settings.epochs):
        _epoch(model, optimiser, data, weights, plain, rows, generator)
        with torch.no_grad():
            found = model.loss(_at(data, held_out), _weights_at(weights, held_out), plain)
        better = found < _to_beat(best, settings.least_improvement)
        best = torch.where(better, found, best)
        _keep(kept, model, better)
        waited = 0 if better.any() else waited + 1
        if waited >= settings.patience:
            break
    with torch.no_grad():
        for parameter, one in zip(model.parameters(), kept, strict=True):
            parameter.copy_(one)
    model.elites.copy_(best.argsort(stable=True)[: settings.elites].sort().values)
    return best


def _to_beat(best: Tensor, share: float) -> Tensor:
    """What a loss must be below to count as better than `best`, which is infinite at first."""
    return torch.where(best.isinf(), best, best - share * best.abs()) if share else best


def _epoch(
    model: WorldModel,
    optimiser: FlatAdam,
    data: Transitions,
    weights: Tensor | None,
    plain: bool,
    rows: Tensor,
    generator: torch.Generator,
) -> None:
    settings = model.settings
    each = torch.stack([rows[torch.randperm(len(rows), generator=generator)] for _ in range(settings.members)])
    for batch in each.split(settings.batch, 1):
        optimiser.descend(model.loss(_at(data, batch), _weights_at(weights, batch), plain).sum())


def _keep(kept: list[Tensor], model: WorldModel, better: Tensor) -> None:
    """Update the best weights of the members that are `better` [M]. What members share is kept with any of them."""
    with torch.no_grad():
        for one, parameter in zip(kept, model.parameters(), strict=True):
            own = parameter.dim() == 3
            chosen = better[:, None, None] if own else better.any()
            one.copy_(torch.where(chosen, parameter, one))


def _at(data: Transitions, rows: Tensor) -> Transitions:
    """Transitions [M, B, ...] of rows [M, B]."""
    return Transitions(*(getattr(data, field.name)[rows] for field in fields(data)))


def _weights_at(weights: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if weights is None else weights[:, rows]
