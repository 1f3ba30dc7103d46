"""VaGraM: a dynamics model's errors weighted, dimension by dimension, by the gradient of the value.

After Voelcker et al., arXiv 2204.01464. `state_loss` has its loss, the one it is derived from (VAML, of first order) and the
squared error. Errors are in standard deviations of the changes of state and gradients per such unit: products are as without.
"""

from __future__ import annotations

from torch import Tensor

from stages.records.card import Card
from stages.values.settings import ValueAware

CARD = Card(
    slug="vagram",
    title="VaGraM",
    paper="Voelcker et al., arXiv 2204.01464",
    equation="mean_j [1/K sum_k (g_kj D_j)^2] + (reward error)^2, g_k = dV_k/ds at the true next state, D the error of the state",
    assumptions="a smooth value function; errors small enough for its first-order expansion",
    reduces_to="g = 1: squared error; without the sum's cross terms: VAML",
    tested_by="tests/control/off_policy/test_vagram.py",
    switch="dynamics.loss: vagram of environment gymnasium, lane control; annotate.evaluation.model_rollouts: {}",
)


def weights_of(gradients: Tensor, unit: Tensor, settings: ValueAware) -> Tensor:
    """What errors in `unit` [S] are multiplied by, [K, B, S], from the critics' gradients [K, B, S]."""
    if settings.per_head == "cumulative":
        gradients = gradients.cumsum(0)
    if settings.clip_quantile is not None:
        gradients = clipped(gradients, settings.clip_quantile)
    gradients = gradients * unit
    if settings.unit_gradients:
        gradients = gradients / gradients.square().mean().sqrt().clamp(min=1e-30)
    return gradients


def clipped(gradients: Tensor, quantile: float) -> Tensor:
    """Gradients [K, B, S], of which none is longer than its critic's `quantile` of lengths."""
    norms = gradients.norm(dim=-1)
    most = norms.quantile(quantile, dim=1, keepdim=True)
    return gradients * (most / norms.clamp(min=1e-30)).clamp(max=1.0)[..., None]


def state_loss(kind: str, errors: Tensor, gradients: Tensor | None) -> Tensor:
    """Loss [...] of errors [..., S] in the next state; gradients: [K, ..., S]. kind: mse, vaml or vagram. Raises KeyError."""
    if kind == "mse":
        return errors.square().mean(-1)
    assert gradients is not None
    products = gradients * errors
    return {"vaml": products.sum(-1).square().mean(0), "vagram": products.square().mean(0).mean(-1)}[kind]


def gaussian_loss(errors: Tensor, log_std: Tensor) -> Tensor:
    """Negative log-likelihood [...], up to a constant, averaged over dimensions."""
    return (0.5 * (errors * (-log_std).exp()).square() + log_std).mean(-1)
