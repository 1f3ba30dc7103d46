"""AgentSwift's search tree over evaluated designs: which of them the next one is made from. Pure functions of numbers.

E_i = alpha ((1 - beta) s_i + beta u_i - max_j s_j);  P(i) = lambda / n + (1 - lambda) exp(E_i) / sum_j exp(E_j)
over all n evaluated designs; u_i is how far the value model's prediction was from the score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stages.designs.settings import DesignTree
from stages.designs.space import Design
from stages.records.card import Card

CARD = Card(
    slug="agentswift",
    title="AgentSwift: search over agent designs",
    paper="Li et al., arXiv 2506.06017",
    equation="a design is made from an evaluated one, drawn with lambda/n + (1 - lambda) softmax(alpha ((1 - beta) score + beta "
    "|score - predicted|)); its component, option and decoding are changed in turn, the value model picking among candidates",
    assumptions="a score in [0, 1] per design; deterministic operations in place of those that a language model writes; labels "
    "count towards the budget",
    reduces_to="lambda = 1 or alpha = 0: uniform selection; unguided with one proposal: random local search; beta = 0 and a "
    "perfect value model: greedy hill climbing with restarts",
    tested_by="tests/designs/test_tree.py",
    switch="design.method: agentswift",
)


@dataclass(frozen=True)
class Node:
    """An evaluated design. Scores lie in [0, 1]; a design that could not be run has score 0 and says why in `failed`."""

    design: Design
    parent: int
    """Number of the node that it was made from; -1 for the first."""
    origin: str
    """root | covering | promising | poor | tree | random."""
    score: float
    error: float
    """Standard error of the score."""
    by_domain: Mapping[str, tuple[float, float]]
    """Domain -> its score there and the standard error."""
    predicted: float | None = None
    """What the value model said before the design was evaluated, if there was one, and ..."""
    std: float | None = None
    """... its standard deviation."""
    failures: Mapping[str, float] = field(default_factory=dict)
    """Shares: `refused` of its actions, `cut` of its episodes (by a limit)."""
    failed: str = ""
    reused: int = 0
    """Proposals before it that had been evaluated already."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "design": list(self.design), "by_domain": {k: list(v) for k, v in self.by_domain.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Node:
        by_domain = {name: (float(score), float(error)) for name, (score, error) in values["by_domain"].items()}
        return cls(**{**values, "design": tuple(values["design"]), "by_domain": by_domain})


def surprise(score: float, predicted: float, error: float = 0.0) -> float:
    """u = |score - predicted|, less what the score's standard error `error` explains."""
    return max(0.0, abs(score - predicted) - error)


def uncertainties(nodes: Sequence[Node], tree: DesignTree) -> list[float]:
    """u of each node; 0 where nothing was predicted, or where the design could not be run."""
    found = []
    for node in nodes:
        if node.predicted is None or node.failed:
            found.append(0.0)
        elif tree.uncertainty == "std":
            found.append(float(node.std or 0.0))
        else:
            found.append(surprise(node.score, node.predicted, node.error if tree.subtract_noise else 0.0))
    return found


def backed_up(values: Sequence[float], parents: Sequence[int], how: str) -> list[float]:
    """Each value with those of its descendants: their mean, their largest, or (none) without them. A parent comes before its
    children."""
    if how == "none":
        return list(values)
    sums, counts, largest = list(values), [1] * len(values), list(values)
    for child in range(len(values) - 1, -1, -1):
        parent = parents[child]
        if parent >= 0:
            sums[parent] += sums[child]
            counts[parent] += counts[child]
            largest[parent] = max(largest[parent], largest[child])
    return largest if how == "max" else [total / count for total, count in zip(sums, counts, strict=True)]


def visits(parents: Sequence[int]) -> list[int]:
    """How many evaluated designs lie at or below each."""
    counts = [1] * len(parents)
    for child in range(len(parents) - 1, -1, -1):
        if parents[child] >= 0:
            counts[parents[child]] += counts[child]
    return counts


def selection_probabilities(
    scores: Sequence[float],
    uncertainty: Sequence[float],
    *,
    lam: float,
    alpha: float,
    beta: float,
    failed: Sequence[bool] | None = None,
) -> np.ndarray:
    """P [n] (see the module). Failed designs have the uniform share alone. Raises ValueError without designs."""
    s, u = np.asarray(scores, dtype=np.float64), np.asarray(uncertainty, dtype=np.float64)
    if not len(s):
        raise ValueError("nothing to select from: no design was evaluated")
    weight = (1 - beta) * s + beta * u
    living = ~np.asarray(failed, dtype=bool) if failed is not None and not all(failed) else np.ones(len(s), dtype=bool)
    # The largest exponent is taken off in place of max s: it cancels all the same, and nothing overflows.
    exponents = np.exp(alpha * (weight - weight[living].max())) * living
    return lam / len(s) + (1 - lam) * exponents / exponents.sum()


def node_probabilities(nodes: Sequence[Node], tree: DesignTree, beta: float) -> np.ndarray:
    """P [n] of evaluated designs, their scores and uncertainties backed up."""
    parents = [node.parent for node in nodes]
    scores = backed_up([node.score for node in nodes], parents, tree.backup)
    known = backed_up(uncertainties(nodes, tree), parents, tree.backup)
    failed = [bool(node.failed) for node in nodes]
    return selection_probabilities(scores, known, lam=tree.lam, alpha=tree.alpha, beta=beta, failed=failed)
