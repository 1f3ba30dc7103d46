"""Which child a descent goes to next.

Rules (Q = value of a child, n its visits, N those of its parent):
  uct      Q + c sqrt(ln N / n)      rStar (2408.06195), rStar-Math (2501.04519)
  uct_2ln  Q + c sqrt(2 ln N / n)    UCB1 as LATS (2310.04406) and ReST-MCTS* (2406.03816) write it
  puct     Q + c P sqrt(N) / (1 + n) P = softmax over siblings of the length-normalised log-probability / temperature
Under both UCT rules an unvisited child comes first; under PUCT it counts with Q = 0 and its prior decides. Equal scores go to
the first child.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stages.params import Selection


@dataclass(frozen=True)
class Arm:
    """What selection knows of a child. `q` in reward units; `prior` the action's mean log-probability per token (nats)."""

    q: float
    visits: int
    prior: float


def uct(q: float, visits: int, parent_visits: int, c: float, factor: float = 1.0) -> float:
    """Q + c sqrt(factor ln N / n); infinite for an unvisited child."""
    if visits == 0:
        return math.inf
    return q + c * math.sqrt(factor * math.log(parent_visits) / visits)


def puct(q: float, visits: int, parent_visits: int, c: float, probability: float) -> float:
    """Q + c P sqrt(N) / (1 + n)."""
    return q + c * probability * math.sqrt(parent_visits) / (1 + visits)


def softmax(priors: Sequence[float], temperature: float) -> list[float]:
    """Probabilities proportional to exp(prior / temperature)."""
    top = max(priors)
    weights = [math.exp((prior - top) / temperature) for prior in priors]
    return [weight / sum(weights) for weight in weights]


def scores(arms: Sequence[Arm], parent_visits: int, selection: Selection) -> list[float]:
    """The score of every child under the chosen rule."""
    if selection.rule == "puct":
        probabilities = softmax([arm.prior for arm in arms], selection.prior_temperature)
        return [
            puct(arm.q, arm.visits, parent_visits, selection.c, probability)
            for arm, probability in zip(arms, probabilities, strict=True)
        ]
    factor = 2.0 if selection.rule == "uct_2ln" else 1.0
    return [uct(arm.q, arm.visits, parent_visits, selection.c, factor) for arm in arms]


def select(arms: Sequence[Arm], parent_visits: int, selection: Selection) -> int:
    """Index of the child to go to: the highest score, the first of equals. Raises ValueError if there are no children."""
    ranked = scores(arms, parent_visits, selection)
    return ranked.index(max(ranked))
