"""Utilities with variances from soft choices: a Thurstone model fitted by Adam (Mazeika et al., arXiv 2502.08640).

    U_i ~ N(mu_i, s_i^2),   P(i over j) = Phi((mu_i - mu_j) / sqrt(s_i^2 + s_j^2 + 1e-5))
    mu = (m - mean m) / (sd m + 1e-5),   s^2 = exp(t) / (sd m + 1e-5)^2,   sd with n-1

so that mu has mean 0 and standard deviation 1. m and t are free and start at 0.01 N(0, 1); the loss is the mean cross-entropy of
P against the share p_ij of choices of i. `stages/judging/ratings.py` has the model with equal variances, by Newton's method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.seeding import key64

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EPSILON = 1e-5
Pair = tuple[int, int]
Choices = Mapping[Pair, float]
"""(i, j) with i < j -> share of choices of i."""


@dataclass(frozen=True)
class Fitted:
    """`mu` and `variance` by outcome."""

    mu: tuple[float, ...]
    variance: tuple[float, ...]

    def probability(self, i: int, j: int) -> float:
        """P(i over j)."""
        import torch

        one, other = (torch.tensor([self.mu[at]], dtype=torch.float64) for at in (i, j))
        return float(choice_probability(one - other, torch.tensor([self.variance[i] + self.variance[j]], dtype=torch.float64)))


def choice_probability(gap: Tensor, variance: Tensor) -> Tensor:
    """Phi(gap / sqrt(variance + 1e-5))."""
    import torch

    return torch.special.ndtr(gap / (variance + EPSILON).sqrt())


def standardised(m: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(mu, s^2); see the module."""
    deviation = m.std() + EPSILON
    return (m - m.mean()) / deviation, t.exp() / deviation**2


def fit(choices: Choices, count: int, epochs: int = 1000, rate: float = 0.01, prior: float = 0.0, seed: int = 42) -> Fitted:
    """Utilities of `count` outcomes. `prior`: precision of a normal prior on t. Raises ValueError without choices."""
    import torch

    if not choices:
        raise ValueError("utilities need choices between outcomes, and there are none")
    rng = torch.Generator().manual_seed(key64("thurstone", seed) % 2**63)
    m, t = (0.01 * torch.randn(count, generator=rng, dtype=torch.float64) for _ in range(2))
    pairs = torch.tensor(sorted(choices))
    shares = torch.tensor([choices[pair] for pair in sorted(choices)], dtype=torch.float64)
    m.requires_grad_()
    t.requires_grad_()
    optimiser = torch.optim.Adam([m, t], lr=rate)
    for _ in range(epochs):
        optimiser.zero_grad()
        loss = cross_entropy(*standardised(m, t), pairs, shares) + prior / 2 * (t**2).sum() / len(shares)
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        mu, variance = standardised(m, t)
    return Fitted(tuple(mu.tolist()), tuple(variance.tolist()))


def cross_entropy(mu: Tensor, variance: Tensor, pairs: Tensor, shares: Tensor) -> torch.Tensor:
    """Mean cross-entropy of the model against the shares [E] of pairs [E, 2]."""
    import torch

    one, other = pairs[:, 0], pairs[:, 1]
    gap, spread = mu[one] - mu[other], (variance[one] + variance[other] + EPSILON).sqrt()
    first, second = torch.special.log_ndtr(gap / spread), torch.special.log_ndtr(-gap / spread)
    return -(shares * first + (1 - shares) * second).mean()
