"""AgentSwift's search tree over evaluated designs: selection of the next parent. Pure functions of numbers.

E_i = alpha ((1 - beta) s_i + beta u_i - max_j s_j);  P(i) = lambda / n + (1 - lambda) exp(E_i) / sum_j exp(E_j)
over all n evaluated designs; u_i is the error of the value model's prediction.
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
    """An evaluated design with a score in [0, 1]; a rejected design has score 0 and the reason in `failed`."""

    design: Design
    parent: int
    """Index of the node that it was derived from; -1 for the first."""
    origin: str
    """root | covering | promising | poor | tree | random."""
    score: float
    error: float
    """Standard error of the score."""
    by_domain: Mapping[str, tuple[float, float]]
    """Domain -> score and standard error."""
    predicted: float | None = None
    """The value model's prediction before the evaluation, if there was a model, with standard deviation `std`."""
    std: float | None = None
    failures: Mapping[str, float] = field(default_factory=dict)
    """`refused`: share of its actions that were rejected; `cut`: share of its episodes that were truncated."""
    failed: str = ""
    reused: int = 0
    """Proposals before it that had been evaluated before."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "design": list(self.design), "by_domain": {k: list(v) for k, v in self.by_domain.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Node:
        by_domain = {name: (float(score), float(error)) for name, (score, error) in values["by_domain"].items()}
        return cls(**{**values, "design": tuple(values["design"]), "by_domain": by_domain})


def surprise(score: float, predicted: float, error: float = 0.0) -> float:
    """u = max(0, |score - predicted| - error), `error` being the score's standard error."""
    return max(0.0, abs(score - predicted) - error)


def uncertainties(nodes: Sequence[Node], tree: DesignTree) -> list[float]:
    """u of each node; 0 without a prediction or for a rejected design."""
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
    """Each value combined with those of its descendants: mean, max, or none. Parents precede children."""
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
    """Number of designs in each subtree."""
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
    """P [n] (see the module). Rejected designs have only the uniform share. Raises ValueError without designs."""
    s, u = np.asarray(scores, dtype=np.float64), np.asarray(uncertainty, dtype=np.float64)
    if not len(s):
        raise ValueError("no design was evaluated")
    weight = (1 - beta) * s + beta * u
    valid = ~np.asarray(failed, dtype=bool) if failed is not None and not all(failed) else np.ones(len(s), dtype=bool)
    # The largest exponent is subtracted instead of max s: it cancels as well, and nothing overflows.
    exponents = np.exp(alpha * (weight - weight[valid].max())) * valid
    return lam / len(s) + (1 - lam) * exponents / exponents.sum()


def node_probabilities(nodes: Sequence[Node], tree: DesignTree, beta: float) -> np.ndarray:
    """P [n] of evaluated designs, from backed-up scores and uncertainties."""
    parents = [node.parent for node in nodes]
    scores = backed_up([node.score for node in nodes], parents, tree.backup)
    known = backed_up(uncertainties(nodes, tree), parents, tree.backup)
    failed = [bool(node.failed) for node in nodes]
    return selection_probabilities(scores, known, lam=tree.lam, alpha=tree.alpha, beta=beta, failed=failed)
