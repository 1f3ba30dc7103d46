"""An ensemble of small networks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from stages.values.lipschitz import bounded, power_iteration

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": relu, "silu": silu, "tanh": torch.tanh, "gelu": gelu}
FIRST_ITERATIONS = 10
"""Power iterations for the layers' norms at the start."""


class Ensemble(nn.Module):
    """N networks of one shape, each with its own weights, evaluated as batched products."""

    def __init__(
        self,
        count: int,
        inputs: int,
        width: int,
        layers: int,
        outputs: int,
        activation: str = "relu",
        largest_norm: float | None = None,
    ) -> None:
        """largest_norm: bound of every layer's spectral norm, as `measure` last found them; None: no bound."""
        super().__init__()
        sizes = [inputs, *[width] * layers, outputs]
        shapes = list(pairwise(sizes))
        self.activation, self.largest_norm = ACTIVATIONS[activation], largest_norm
        self.weights = nn.ParameterList(_uniform(count, here, there, here**-0.5) for here, there in shapes)
        self.biases = nn.ParameterList(_uniform(count, 1, there, here**-0.5) for here, there in shapes)
        self.count, self._layers = count, list(zip(self.weights, self.biases, strict=True))
        """The parameters themselves, which is faster than a ParameterList: change them in place, do not replace them."""
        if largest_norm is not None:
            generator = torch.Generator().manual_seed(0)
            for place, (here, there) in enumerate(shapes):
                self.register_buffer(f"left_{place}", torch.zeros(count, here))
                self.register_buffer(f"right_{place}", torch.randn(count, there, generator=generator))
            self.measure(FIRST_ITERATIONS)

    @torch.no_grad()
    def measure(self, iterations: int) -> None:
        """Update what is known of the layers' norms by power iterations; nothing to do without `largest_norm`."""
        if self.largest_norm is None:
            return
        for place, weight in enumerate(self.weights):
            found = power_iteration(weight, self.get_buffer(f"right_{place}"), iterations)
            self.get_buffer(f"left_{place}").copy_(found[0])
            self.get_buffer(f"right_{place}").copy_(found[1])

    def _bounded(self, place: int, weight: Tensor) -> Tensor:
        if self.largest_norm is None:
            return weight
        return bounded(weight, self.get_buffer(f"left_{place}"), self.get_buffer(f"right_{place}"), self.largest_norm)

    def norms(self) -> Tensor:
        """Spectral norms [N, L] of the layers in use."""
        weights = (self._bounded(place, weight.detach()) for place, weight in enumerate(self.weights))
        return torch.stack([torch.linalg.matrix_norm(weight, 2) for weight in weights], 1)

    def forward(self, inputs: Tensor, frozen: bool = False) -> Tensor:
        """[N, B, outputs] of inputs [B, inputs], or of each member's own [N, B, inputs]. frozen: gradients reach inputs only."""
        values = inputs.expand(self.count, *inputs.shape[-2:])
        for place, (weight, bias) in enumerate(self._layers):
            if frozen:
                weight, bias = weight.detach(), bias.detach()
            values = torch.baddbmm(bias, self.activation(values) if place else values, self._bounded(place, weight))
        return values


def _uniform(count: int, rows: int, columns: int, most: float) -> Tensor:
    return torch.empty(count, rows, columns).uniform_(-most, most)
