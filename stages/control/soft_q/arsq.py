"""ARSQ: a soft Q-function over discretised actions, dimension by dimension, each conditioned on the choices before it.

After Liu et al., arXiv 2502.00288. An action in [-1, 1]^D becomes T = levels * D choices among `bins`, coarse to fine: all
dimensions of the first level, then of the next. Position p stands for dimension p % D at level p // D.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from stages.control.soft_q.settings import DemoTerm, Discretised
from stages.records.card import Card
from stages.values.ensemble import Ensemble

CARD = Card(
    slug="arsq",
    title="ARSQ",
    paper="Liu et al., arXiv 2502.00288",
    equation="Q(s, c) = V(s) + sum_p A_p(c_p | s, c_<p), A_p = a_p - alpha logsumexp(a_p / alpha); pi = prod_p exp(A_p / alpha)",
    assumptions="actions in a box; rewards scaled to alpha",
    reduces_to="one dimension and level: soft Q-learning; alpha to 0: dueling Q-learning; condition none: independent dimensions",
    tested_by="tests/control/soft_q/test_arsq.py",
    switch="condition: prefix of environments joint_actions, detour and soft_q, lane control",
)


FIRST_OUTPUTS = 0.01
"""Factor of the last layers' first weights."""


def offsets(codes: Tensor, dimensions: int, bins: int) -> Tensor:
    """How far each choice [B, T] moves the centre of its dimension's interval, [B, T, D]."""
    level = torch.arange(codes.shape[1]) // dimensions
    shift = 2.0 * float(bins) ** -level * ((codes + 0.5) / bins - 0.5)
    place = torch.arange(codes.shape[1]) % dimensions
    return shift[..., None] * nn.functional.one_hot(place, dimensions)


def decode(codes: Tensor, dimensions: int, bins: int) -> Tensor:
    """Actions [B, D] of choices [B, T]: the centres of the last intervals."""
    return offsets(codes, dimensions, bins).sum(1)


def sequence(levels: int, dimensions: int, order: str, first_dimension: str) -> list[int]:
    """The positions [T] in the order of the choices; a dimension's levels are always coarse to fine."""
    of_level = list(range(dimensions))[:: 1 if first_dimension == "first" else -1]
    if order == "level_major":
        return [level * dimensions + place for level in range(levels) for place in of_level]
    return [level * dimensions + place for place in of_level for level in range(levels)]


def prefixes(codes: Tensor, dimensions: int, bins: int, order: list[int]) -> Tensor:
    """Centres of all dimensions' intervals before each choice, [B, T, D] of [B, T]. order: of the choices, see `sequence`."""
    chosen = offsets(codes, dimensions, bins)[:, order]
    before = chosen.cumsum(1) - chosen
    return before[:, torch.tensor(order).argsort()]


def encode(action: Tensor, levels: int, bins: int) -> Tensor:
    """Choices [B, T] of actions [B, D] in [-1, 1]; an interval's upper end belongs to the next bin, except at 1."""
    centre, codes = torch.zeros_like(action), []
    for level in range(levels):
        width = 2.0 * float(bins) ** -level
        code = ((action - centre + width / 2) / (width / bins)).floor().clamp(0, bins - 1)
        centre = centre + width * ((code + 0.5) / bins - 0.5)
        codes.append(code.long())
    return torch.cat(codes, 1)


def normalised(raw: Tensor, alpha: float) -> Tensor:
    """Advantages [..., bins] of raw values, such that exp(A / alpha) are probabilities; all at most 0."""
    return alpha * torch.log_softmax(raw / alpha, -1)


def demo_term(advantages: Tensor, codes: Tensor, term: DemoTerm) -> Tensor:
    """[..., B]: how much the other bins' advantages [..., B, T, bins] exceed those of the data's bins [B, T], summed over
    positions; 0 for kind none."""
    chosen = codes.expand(advantages.shape[:-1])[..., None]
    own = advantages.gather(-1, chosen)
    others = nn.functional.one_hot(codes, advantages.shape[-1]) == 0
    if term.kind == "logsumexp":
        rivals = (advantages / term.temperature).masked_fill(~others, -torch.inf)
        excess = term.temperature * rivals.logsumexp(-1) - own[..., 0]
        return excess.clamp(min=term.least).sum(-1)
    if term.kind == "margin":
        excess = (advantages - own).clamp(min=term.least) * others
        return excess.sum((-2, -1)) / (advantages.shape[-1] - 1)
    return torch.zeros(advantages.shape[:-2])


def reduced(terms: Tensor, demonstrated: int, reduce: str) -> Tensor:
    """One number per network [...] of the demonstrations' terms [..., B]: the mean over the first `demonstrated` rows (0 without
    any), or with `batch_sum` the sum over all rows."""
    if reduce == "batch_sum":
        return terms.sum(-1)
    return terms[..., :demonstrated].mean(-1) if demonstrated else torch.zeros(terms.shape[:-1])


def make_orthogonal(network: Ensemble) -> None:
    """Orthogonal weights, of gain sqrt(2) in hidden layers and 1 in the last one, and biases of 0."""
    *hidden, last = network.weights
    for weights, gain in [*((one, math.sqrt(2.0)) for one in hidden), (last, 1.0)]:
        for member in weights:
            nn.init.orthogonal_(member, gain)
    for biases in network.biases:
        biases.zero_()


class SoftQ(nn.Module):
    """Two networks; each gives V(s) and the advantages of every position."""

    def __init__(self, observations: int, dimensions: int, settings: Discretised) -> None:
        super().__init__()
        self.dimensions, self.bins, self.alpha = dimensions, settings.bins, settings.alpha
        self.positions = settings.levels * dimensions
        self.conditioned = settings.condition == "prefix"
        self.order = sequence(settings.levels, dimensions, settings.order, settings.first_dimension)
        width, layers, activation = settings.width, settings.layers, settings.activation
        self.state_value = Ensemble(2, observations, width, layers, 1, activation)
        self.heads = Ensemble(2, observations + dimensions, width, layers, self.positions * self.bins, activation)
        with torch.no_grad():
            for network in (self.state_value, self.heads):  # at first all bins are about equally likely, at a small alpha too
                if settings.first_weights == "orthogonal":
                    make_orthogonal(network)
                network.weights[-1].mul_(FIRST_OUTPUTS)
                network.biases[-1].zero_()

    def advantages(self, observation: Tensor, codes: Tensor) -> Tensor:
        """[2, B, T, bins] after the choices [B, T] before each position, of observations [B, S]."""
        before = prefixes(codes, self.dimensions, self.bins, self.order)
        if not self.conditioned:
            before = torch.zeros_like(before)
        inputs = torch.cat([observation[:, None].expand(-1, self.positions, -1), before], -1)
        raw = self.heads(inputs.flatten(0, 1)).unflatten(-1, (self.positions, self.bins)).unflatten(1, (-1, self.positions))
        return normalised(raw.diagonal(dim1=2, dim2=3).movedim(-1, 2), self.alpha)

    def forward(self, observation: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Q [2, B] of choices [B, T], and `advantages`."""
        found = self.advantages(observation, codes)
        taken = found.gather(-1, codes.expand(2, *codes.shape)[..., None])[..., 0]
        return self.state_value(observation)[..., 0] + taken.sum(-1), found

    @torch.no_grad()
    def act(self, observation: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Actions [B, D], position by position from the smaller of both networks' advantages; greedy without `generator`."""
        codes = torch.zeros(len(observation), self.positions, dtype=torch.int64)
        for position in self.order:
            smaller = self.advantages(observation, codes)[:, :, position].amin(0)
            if generator is None:
                codes[:, position] = smaller.argmax(-1)
            else:
                chances = torch.softmax(smaller / self.alpha, -1)
                codes[:, position] = torch.multinomial(chances, 1, generator=generator)[:, 0]
        return decode(codes, self.dimensions, self.bins)
