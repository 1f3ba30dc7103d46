"""A learnt model of a domain's dynamics over vectors of states and actions, with errors weighted by a value's gradient.

The model is a deterministic ensemble that predicts changes of state; its loss is VaGraM's (stages/values/vagram.py) by default.
The value U(s') of a state is what arriving there paid and what followed, fitted to the returns of episodes;
stages/values/lipschitz.py keeps it from changing fast. With slopes of at most L, a model that is wrong by w moves a target by at
most L w.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stages.seeding import key64, seed_torch
from stages.values.ensemble import Ensemble
from stages.values.lipschitz import local_slopes, slope_penalty
from stages.values.settings import StateModel, ValueAware
from stages.values.vagram import state_loss, weights_of

VALUE_LAYERS = 2


@dataclass(frozen=True)
class Moves:
    """N steps of episodes."""

    state: Tensor
    """[N, S]."""
    action: Tensor
    """[N, A]: its last entries are the context."""
    following: Tensor
    """[N, S]."""
    after: Tensor
    """[N, C]: the context after the step."""
    value: Tensor
    """[N]: the step's reward and all later ones."""

    def at(self, rows: Tensor) -> Moves:
        return Moves(*(getattr(self, field.name)[rows] for field in fields(self)))


class LearntModel(nn.Module):
    """See the module. `sizes`: of states, actions and context."""

    def __init__(self, settings: StateModel, sizes: tuple[int, int, int], *key: object) -> None:
        super().__init__()
        seed_torch(*key, "state_model")
        states, actions, context = sizes
        self.settings = settings
        self.network = Ensemble(settings.members, states + actions, settings.width, settings.layers, states, "silu")
        largest = settings.lipschitz.beta if settings.lipschitz.kind == "spectral" else None
        shape = (settings.critics, states + context, settings.width, VALUE_LAYERS, 1)
        self.value = Ensemble(*shape, "silu", largest)

    def changes(self, state: Tensor, action: Tensor) -> Tensor:
        """Every member's predicted change of state, [M, B, S], of inputs [B, ...] or [M, B, ...]."""
        return self.network(torch.cat([state, action], -1))

    def values(self, state: Tensor, context: Tensor) -> Tensor:
        """Every critic's U [K, B] of states [1 or K, B, S] with contexts [B, C]."""
        return self.value(torch.cat([state, context.expand(len(state), -1, -1)], -1))[..., 0]

    @torch.inference_mode()
    def following(self, state: NDArray[np.float32], action: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mean member's next state [S]; see `stages.environments.learnt.NextState`."""
        change = self.changes(torch.from_numpy(state)[None], torch.from_numpy(action)[None])
        return state + change.mean(0)[0].numpy()


def fit(model: LearntModel, data: Moves, *key: object) -> None:
    """Fit the value to the returns, and the model to the changes of state with the weights that follow. Raises ValueError without
    data."""
    if not len(data.value):
        raise ValueError("a model of the environment needs episodes of the rollout stage; raise rollout.tasks")
    settings, generator = model.settings, torch.Generator().manual_seed(key64(*key, "state_model.fit") % 2**63)
    weights = None
    if settings.loss != "mse":
        _fit_value(model, data, generator)
        weights = gradient_weights(model, data)
    optimiser = torch.optim.Adam(model.network.parameters(), lr=settings.learning_rate)
    for _ in range(settings.updates):
        rows = torch.randint(len(data.value), (settings.members, min(settings.batch, len(data.value))), generator=generator)
        loss = model_loss(model, data.at(rows), None if weights is None else weights[:, rows])
        _step(optimiser, loss)


def _fit_value(model: LearntModel, data: Moves, generator: torch.Generator) -> None:
    settings = model.settings
    lipschitz, scale = settings.lipschitz, torch.ones(data.following.shape[1])
    optimiser = torch.optim.Adam(model.value.parameters(), lr=settings.learning_rate)
    for _ in range(settings.updates):
        batch = data.at(torch.randint(len(data.value), (min(settings.batch, len(data.value)),), generator=generator))
        loss = (model.values(batch.following[None], batch.after) - batch.value).square().mean(1).sum()
        if lipschitz.kind == "robust" and lipschitz.weight * lipschitz.epsilon:
            at = partial(_values_at, model, batch.after)
            penalty = slope_penalty(at, batch.following, lipschitz, scale, generator)
            loss = loss + lipschitz.weight * penalty
        _step(optimiser, loss)
        model.value.measure(lipschitz.power_iterations)


def _values_at(model: LearntModel, context: Tensor, state: Tensor) -> Tensor:
    return model.values(state, context)


def _step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()


def gradient_weights(model: LearntModel, data: Moves) -> Tensor:
    """What errors are multiplied by, [K, N, S]: the critics' gradients at the true next states."""
    settings = model.settings
    at = data.following.expand(settings.critics, -1, -1).clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model.values(at, data.after).sum(), at)
    aware = ValueAware(clip_quantile=settings.clip_quantile, unit_gradients=settings.unit_gradients)
    return weights_of(slopes, torch.ones(data.following.shape[1]), aware)


def model_loss(model: LearntModel, batch: Moves, weights: Tensor | None) -> Tensor:
    """Sum over members of the mean loss of their own batches, [M, B, ...]; weights [K, M, B, S]."""
    errors = model.changes(batch.state, batch.action) - (batch.following - batch.state)
    squared = errors.square().mean(-1)
    if weights is None:
        return squared.mean(1).sum()
    found = state_loss(model.settings.loss, errors, weights)
    return (found + squared if model.settings.plain else found).mean(1).sum()


@torch.no_grad()
def predicted(model: LearntModel, data: Moves) -> Tensor:
    """Next states [N, S]."""
    return data.state + model.changes(data.state, data.action).mean(0)


def errors(model: LearntModel, data: Moves) -> dict[str, float]:
    """state_error: mean squared error of next states; with a value also value_error: mean squared difference that it makes to the
    value, and slope: the 95 % quantile of the value's gradients."""
    found = predicted(model, data)
    measured = {"state_error": float((found - data.following).square().mean())}
    if model.settings.loss == "mse":
        return measured
    with torch.no_grad():
        gap = model.values(found[None], data.after) - model.values(data.following[None], data.after)
    slopes = local_slopes(partial(_values_at, model, data.after), data.following, torch.ones(found.shape[1]))
    return measured | {"value_error": float(gap.square().mean()), "slope": float(slopes.quantile(0.95))}
