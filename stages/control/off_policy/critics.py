"""Ensembles of networks with features of length 1 or layers of bounded norm.

Voelcker et al. (arXiv 2204.01464) divide the features before the last layer by their length, in actor and critics. The forms of
the spectral bound beside the usual one follow from what is known of Zheng et al. (arXiv 2302.01244), whose own is not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from stages.values.ensemble import Ensemble


class UnitFeatures(Ensemble):
    """Networks whose features before the last layer are divided by their Euclidean length."""

    def forward(self, inputs: Tensor, frozen: bool = False) -> Tensor:
        values, last = inputs.expand(self.count, *inputs.shape[-2:]), len(self._layers) - 1
        for place, (weight, bias) in enumerate(self._layers):
            if frozen:
                weight, bias = weight.detach(), bias.detach()
            values = self.activation(values) if place else values
            values = torch.baddbmm(bias, normalize(values, dim=-1) if place == last else values, weight)
        return values


class BoundedCritics(Ensemble):
    """Networks whose layers' norms are bounded, but for the last one's with `free_last`; with `always`, they are set to the bound
    instead: smaller norms are raised to it."""

    free_last = False
    always = False

    def _bounded(self, place: int, weight: Tensor) -> Tensor:
        if self.free_last and place == len(self._layers) - 1:
            return weight
        if self.largest_norm is None or not self.always:
            return super()._bounded(place, weight)
        left, right = self.get_buffer(f"left_{place}"), self.get_buffer(f"right_{place}")
        norm = (left[:, None] @ weight @ right[..., None])[:, 0, 0]
        divisor = torch.where(norm > 0, norm / self.largest_norm, torch.ones_like(norm))  # zero matrices stay
        return weight / divisor[:, None, None]
