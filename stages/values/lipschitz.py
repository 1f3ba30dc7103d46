"""Critics whose value changes slowly with the state: a bound of every layer's norm, or a penalty on adversarial changes.

After Zheng et al., arXiv 2302.01244. With values of slope L, a model that is wrong by w moves a value's target by at most
gamma L w. The paper's exact forms were not available: the spectral bound is standard, and the penalty follows its description.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stages.records.card import Card
from stages.values.settings import Lipschitz

CARD = Card(
    slug="lipschitz_mbrl",
    title="Model-based RL with a Lipschitz-regularised value",
    paper="Zheng et al., arXiv 2302.01244",
    equation="spectral: W / max(1, sigma(W) / beta) in every layer; robust: + weight mean max over |d| <= epsilon of "
    "sum_i (Q_i(s + d, a) - Q_i(s, a))^2; |T V - T' V| <= gamma L W1(p, p')",
    assumptions="values need to change slowly with the state only where the model errs",
    reduces_to="weight 0, epsilon 0 or beta large: SAC, with dynamics MBPO with one deterministic model",
    tested_by="tests/control/off_policy/test_lipschitz.py, tests/control/exact/test_lipschitz_models.py",
    switch="lipschitz.kind: spectral or robust of environment gymnasium, slope of lipschitz_model, lane control; "
    "annotate.evaluation.model_rollouts.lipschitz",
)
Values = Callable[[Tensor], Tensor]
"""States [N, B, S] -> every critic's value [N, B]."""


def power_iteration(weight: Tensor, right: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Left and right singular vectors [N, I], [N, O] of the largest singular values of matrices [N, I, O], from an estimate
    `right` [N, O]. Zero matrices keep a zero left vector."""
    left = torch.zeros_like(weight[:, :, 0])
    for _ in range(steps):
        left = torch.nn.functional.normalize((weight @ right[..., None])[..., 0], dim=-1)
        found = (weight.mT @ left[..., None])[..., 0]
        norm = found.norm(dim=-1, keepdim=True)
        right = torch.where(norm > 0, found / norm.clamp(min=1e-30), right)
    return left, right


def bounded(weight: Tensor, left: Tensor, right: Tensor, beta: float) -> Tensor:
    """Matrices [N, I, O] whose norms, along the singular vectors, are at most `beta`; gradients pass through the norms."""
    norm = (left[:, None] @ weight @ right[..., None])[:, 0, 0]
    return weight / (norm / beta).clamp(min=1.0)[:, None, None]


def slope_penalty(values: Values, state: Tensor, settings: Lipschitz, scale: Tensor, generator: torch.Generator) -> Tensor:
    """Mean over states [B, S] of the sum over critics of the largest squared change of value that the ascent finds within the
    ball. scale [S]: a unit of each dimension. `values` must let gradients through to its weights."""
    with torch.no_grad():
        clean = values(state[None])
    start = random_start(settings, len(clean), state, generator)
    return squared_change(values, state, adversary(values, state, settings, scale, start), settings, scale)


def squared_change(values: Values, state: Tensor, change: Tensor, settings: Lipschitz, scale: Tensor) -> Tensor:
    """Mean over states [B, S] of the sum over critics of the squared change of value by `change` [N, B, S]; units: `scale`."""
    moved, still = values(state + change * scale), values(state[None])
    return ((moved - (still.detach() if settings.stop_clean else still)) ** 2).mean(1).sum()


def adversary(values: Values, state: Tensor, settings: Lipschitz, scale: Tensor, start: Tensor) -> Tensor:
    """Changes [N, B, S] of states [B, S], in units of `scale`, that projected ascent finds from `start` [N, B, S]."""
    clean, change = values(state[None]).detach(), start
    stride = 2.0 * settings.epsilon / settings.steps
    for _ in range(settings.steps):
        change = change.detach().requires_grad_()
        gain = ((values(state + change * scale) - clean) ** 2).sum()
        (slope,) = torch.autograd.grad(gain, change)
        with torch.no_grad():
            change = within(change + stride * steepest(slope, settings), settings)
    return change.detach()


def steepest(slope: Tensor, settings: Lipschitz) -> Tensor:
    """The direction of length 1 in the ball's norm in which a function of this slope [..., S] rises most."""
    return slope.sign() if settings.norm == "linf" else torch.nn.functional.normalize(slope, dim=-1)


def within(change: Tensor, settings: Lipschitz) -> Tensor:
    """The nearest changes [..., S] in the ball."""
    if settings.norm == "linf":
        return change.clamp(-settings.epsilon, settings.epsilon)
    return change * (settings.epsilon / change.norm(dim=-1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)


def random_start(settings: Lipschitz, critics: int, state: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in the ball, [N, B, S]: at its centre the penalty has no slope."""
    shape = (critics, *state.shape)
    if settings.norm == "linf":
        return settings.epsilon * (2.0 * torch.rand(shape, generator=generator) - 1.0)
    direction = torch.nn.functional.normalize(torch.randn(shape, generator=generator), dim=-1)
    return settings.epsilon * torch.rand(shape[:-1], generator=generator)[..., None] ** (1.0 / shape[-1]) * direction


def local_slopes(values: Values, state: Tensor, scale: Tensor) -> Tensor:
    """Euclidean norms [N, B] of the values' gradients by states [B, S], per unit of `scale`."""
    change = torch.zeros(len(values(state[None])), *state.shape, requires_grad=True)
    (slope,) = torch.autograd.grad(values(state + change * scale).sum(), change)
    return slope.norm(dim=-1)


def value_gap(value: Callable[[Tensor], Tensor], true: Tensor, predicted: Tensor, gamma: float) -> Tensor:
    """By how much targets [...] differ if the next state is the predicted [..., S] in place of the true one."""
    return gamma * (value(true) - value(predicted)).abs()
