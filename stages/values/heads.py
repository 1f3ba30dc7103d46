"""Scalar heads (mse, two_hot, hl_gauss, c51): targets to losses, logits to values.

Used by the critics, step-value model, Q-models and progress estimator. For scalar targets c51 is two_hot; it projects return
distributions where Q is learnt by bootstrapping (stages/control/offline_q.py, stages/values/turn_critic.py). Everything is
computed in float32, also under autocast. Categorical heads clamp targets to their support and count how often (`clamped` of
`seen`). HL-Gauss has m bins between m + 1 edges with the bin centres as values; two-hot and C51 have m locations that include
both ends of the support.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.records.card import Card
from stages.values.gaussian import GaussianHead
from stages.values.settings import HeadParams, ReturnDistribution

if TYPE_CHECKING:
    from stages.values.contract import ValueHead

CARD = Card(
    slug="hl_gauss",
    title="HL-Gauss",
    paper="Farebrother et al., Stop Regressing, arXiv 2403.03950",
    equation="p_i(y) = Gaussian mass of N(y, sigma) in bin i, renormalised; loss = -sum_i p_i log softmax(l)_i; value = sum_i "
    "softmax(l)_i z_i; sigma = sigma_ratio bin widths",
    assumptions="the support exceeds the targets by 4 sigma, or targets at its ends decode inwards; targets beyond it are "
    "clamped and counted",
    reduces_to="two locations 0 and 1 with two_hot: binary cross-entropy; sigma -> 0: classification of the target's bin; loss "
    "mse: regression",
    tested_by="tests/values/test_heads.py",
    switch="annotate.value_model.head, annotate.q_model.head, annotate.progress.head, rl.critic.head: {loss: hl_gauss}",
)


def cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """-sum_i p_i log softmax(logits)_i in float32: [..., m], [..., m] -> [...]. Its minimum is the entropy of p, not 0."""
    return -(probabilities * torch.log_softmax(logits.float(), dim=-1)).sum(dim=-1)


class MseHead:
    """One output, squared error (v - y)^2; targets are not clamped."""

    outputs = 1

    def outside(self, target: Tensor) -> Tensor:
        """[...] bool, all False."""
        return torch.zeros(target.shape, dtype=torch.bool, device=target.device)

    def encode(self, target: Tensor) -> Tensor:
        """Targets [...] as float32, without gradient."""
        return target.detach().float()

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits [..., 1], targets [...] -> [...]."""
        return (self.decode(logits) - self.encode(target)).square()

    def decode(self, logits: Tensor) -> Tensor:
        """Logits [..., 1] -> values [...]."""
        return logits.float().squeeze(-1)


class CategoricalHead:
    """Softmax over m values `support`: [m]; the prediction is the mean. Subclasses `spread` a clamped target over it."""

    def __init__(self, v_min: float, v_max: float, support: Tensor) -> None:
        self.v_min, self.v_max = v_min, v_max
        self.support = support
        self.outputs = int(support.numel())
        self.seen = 0
        self._clamped = torch.zeros((), dtype=torch.int64)

    @property
    def clamped(self) -> int:
        """Number of encoded targets so far outside [v_min, v_max]."""
        return int(self._clamped)

    def _on(self, device: torch.device) -> None:
        """Move constants and counters to the targets' device, which avoids a transfer per batch."""
        if self.support.device != device:
            self.support = self.support.to(device)
            self._clamped = self._clamped.to(device)

    def outside(self, target: Tensor) -> Tensor:
        """Which targets [...] will be clamped, [...] bool."""
        return (target < self.v_min) | (target > self.v_max)

    def spread(self, target: Tensor) -> Tensor:
        """Clamped targets [...] -> probabilities [..., m]."""
        raise NotImplementedError

    @torch.no_grad()
    def encode(self, target: Tensor) -> Tensor:
        """Targets [...] -> probabilities [..., m] that sum to 1; targets outside the support are clamped and counted."""
        self._on(target.device)
        target = target.detach().float()
        clamped = target.clamp(self.v_min, self.v_max)
        self.seen += target.numel()
        self._clamped += (clamped != target).sum()
        return self.spread(clamped)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy [...] of logits [..., m] against the encoded targets [...]."""
        return cross_entropy(logits, self.encode(target))

    def decode(self, logits: Tensor) -> Tensor:
        """sum_i softmax(logits)_i z_i: [..., m] -> [...]."""
        self._on(logits.device)
        # A product and a sum, since autocast would run a matrix product in bfloat16.
        return (torch.softmax(logits.float(), dim=-1) * self.support).sum(dim=-1)


class TwoHotHead(CategoricalHead):
    """p_i = (z_{i+1} - y) / (z_{i+1} - z_i), p_{i+1} = 1 - p_i for the neighbours z_i <= y <= z_{i+1}; keeps the mean exactly."""

    def __init__(self, v_min: float, v_max: float, bins: int) -> None:
        super().__init__(v_min, v_max, torch.linspace(v_min, v_max, bins))
        self.step = (v_max - v_min) / (bins - 1)

    def spread(self, target: Tensor) -> Tensor:
        position = ((target - self.v_min) / self.step).clamp(0, self.outputs - 1)
        lower = position.floor().clamp(max=self.outputs - 2)
        upper_share = position - lower
        probabilities = torch.zeros(*target.shape, self.outputs, device=target.device)
        index = lower.long().unsqueeze(-1)
        probabilities.scatter_(-1, index, (1.0 - upper_share).unsqueeze(-1))
        return probabilities.scatter_(-1, index + 1, upper_share.unsqueeze(-1))


class HlGaussHead(CategoricalHead):
    """p_i proportional to Phi((e_i - y)/sigma) - Phi((e_{i-1} - y)/sigma): a Gaussian's mass in each bin, cut off at the ends.

    sigma = sigma_ratio * bin width. A target at the end of the support loses half of its Gaussian and decodes inwards: extend the
    support 4 sigma beyond the targets. As sigma -> 0 the target becomes one-hot on its bin (not two-hot).
    """

    def __init__(self, v_min: float, v_max: float, bins: int, sigma_ratio: float) -> None:
        self.edges = torch.linspace(v_min, v_max, bins + 1)
        super().__init__(v_min, v_max, (self.edges[:-1] + self.edges[1:]) / 2)
        self.sigma = sigma_ratio * (v_max - v_min) / bins

    def _on(self, device: torch.device) -> None:
        super()._on(device)
        if self.edges.device != device:
            self.edges = self.edges.to(device)

    def spread(self, target: Tensor) -> Tensor:
        cdf = torch.erf((self.edges - target.unsqueeze(-1)) / (self.sigma * 2.0**0.5))
        mass = (cdf[..., 1:] - cdf[..., :-1]).clamp(min=0.0)
        return mass / mass.sum(dim=-1, keepdim=True)


class C51Head(TwoHotHead):
    """Two-hot of a scalar target (a point mass), and the projected Bellman update of a whole return distribution."""

    @torch.no_grad()
    def project(self, probabilities: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Distribution of reward + discount * z, clipped to the support and split between neighbours.

        probabilities [..., m] of the next state; reward [...]; discount [...], gamma or 0 at an episode's end -> [..., m].
        A target counts as clamped if its mean is outside the support.
        """
        self._on(probabilities.device)
        moved = reward.float().unsqueeze(-1) + discount.float().unsqueeze(-1) * self.support
        mean = (probabilities.float() * moved).sum(dim=-1)
        self.seen += mean.numel()
        self._clamped += self.outside(mean).sum()
        return (probabilities.float().unsqueeze(-1) * self.spread(moved.clamp(self.v_min, self.v_max))).sum(dim=-2)

    def distribution_loss(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """Cross-entropy [...] of logits [..., m] against a projected distribution [..., m]."""
        return cross_entropy(logits, probabilities)


def make_head(params: HeadParams | ReturnDistribution, copies: int = 1) -> ValueHead:
    """The head for `params.loss`, or a Gaussian one for `copies` critics."""
    if isinstance(params, ReturnDistribution):
        return GaussianHead(params, copies)
    if params.loss == "mse":
        return MseHead()
    if params.loss == "hl_gauss":
        return HlGaussHead(params.v_min, params.v_max, params.bins, params.sigma_ratio)
    return (C51Head if params.loss == "c51" else TwoHotHead)(params.v_min, params.v_max, params.bins)
