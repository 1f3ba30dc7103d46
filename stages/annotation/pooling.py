"""Labels from rollouts under adaptive sampling: posterior means, pooled over the trees of a domain.

The search visits a node again depending on its first rollouts' returns. Their plain mean is then biased: upwards over nodes with
`labels.min_visits` (lucky nodes were visited again), downwards over all nodes (unlucky ones were not). A posterior mean is
unbiased whatever the stopping rule, to the extent that the prior is right. The prior is estimated from the trees (empirical
Bayes):

    q(node) = (phi * sum of outcomes + s_d * V(parent)) / (phi * n + s_d)

for the n outcomes r + gamma * (rewards after the node) of a node at depth d: the mean of Q(s, a) over the policy's actions is
V(s). Outcomes are Beta-binomial on the range of returns; s_d, the similarity of siblings at depth d, is the most probable of
STRENGTHS given all trees under a broad prior centred at PRIOR_STRENGTH. phi is 1 for binary outcomes and grows as graded outcomes
vary less between rollouts; it is infinite, and q the plain mean, if they do not vary. Roots are shrunk to the mean over the
trees: under eager expansion, where no rollout starts at a root, to the mean outcome of the roots' children. Values of ends are
known.

Reduces to the plain mean as s_d -> 0 and as n grows. stages/claims/label_bias.py measures the bias in worlds with known Q.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stages.annotation.nodes import Row, children_of, ended, first_rollouts

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

STRENGTHS = 2.0 ** np.arange(-3, 9.01, 0.25)
"""Candidates for s_d: the number of rollouts that the parent's value is worth."""
PRIOR_STRENGTH, PRIOR_WIDTH = 4.0, 1.5
"""The prior of log s_d: mean log PRIOR_STRENGTH, standard deviation PRIOR_WIDTH."""
EDGE = 1e-3
"""Prior means are clipped to [EDGE, 1 - EDGE]: at 0 or 1 the opposite outcome would be impossible."""


class _Outcomes:
    """Returns of the policy's rollouts from each node's action on, scaled to [0, 1] from `returns` or the nodes' wider range."""

    def __init__(self, trees: Mapping[str, Sequence[Row]], gamma: float, returns: Sequence[float]) -> None:
        rows = [row for tree in trees.values() for row in tree if row["n_rollouts"] and not ended(row)]
        count = np.array([row["n_rollouts"] for row in rows], dtype=np.float64)
        reward = np.array([row["reward"] for row in rows], dtype=np.float64)
        after, squares = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("R", "R2"))
        mean = reward + gamma * after / count
        self.low = float(mean.min(initial=returns[0]))
        self.width = float(mean.max(initial=returns[1])) - self.low
        share = (mean - self.low) / self.width
        spread = (gamma / self.width) ** 2 * (squares - after**2 / count)
        binary, own = float((count * share * (1 - share)).sum()), float(spread.sum())
        # Rounding leaves no variation a little above or below 0.
        self.weight = 1.0 if binary < 1e-9 else np.inf if own < 1e-9 else binary / own

    def scaled(self, value: float) -> float:
        return (value - self.low) / self.width


def strength(successes: np.ndarray, counts: np.ndarray, means: np.ndarray) -> float:
    """The most probable s of Beta(s m, s (1 - m)) priors with means [M], given `successes` [M] of `counts` [M] (not necessarily
    integers)."""
    from scipy.special import betaln

    m = means.clip(EDGE, 1 - EDGE)
    scores = []
    for s in STRENGTHS:
        a, b = s * m, s * (1 - m)
        likelihood = float((betaln(a + successes, b + counts - successes) - betaln(a, b)).sum())
        scores.append(likelihood - 0.5 * ((np.log(s) - np.log(PRIOR_STRENGTH)) / PRIOR_WIDTH) ** 2)
    return float(STRENGTHS[int(np.argmax(scores))])


def pooled_values(trees: Mapping[str, Sequence[Row]], params: Annotate) -> dict[str, list[float]]:
    """V of every node of every tree, by task: q = r + gamma V is the posterior mean; V is 0 at an end."""
    gamma, outcomes = params.gamma, _Outcomes(trees, params.gamma, params.returns)
    values = {task: [row["R"] / row["n_rollouts"] if row["n_rollouts"] else 0.0 for row in tree] for task, tree in trees.items()}
    if np.isinf(outcomes.weight) or not gamma:
        return values
    first = [row for tree in trees.values() for row in first_rollouts(tree)]
    outcome = (row["reward"] * row["n_rollouts"] + gamma * row["R"] if row["node"] else row["R"] for row in first)
    root_mean = sum(outcome) / max(1, sum(row["n_rollouts"] for row in first))
    children = {task: children_of(tree) for task, tree in trees.items()}
    level = [(task, 0) for task in trees]
    while at := [(task, trees[task][node]) for task, node in level if not ended(trees[task][node])]:
        level = [(task, child) for task, row in at for child in children[task][row["node"]]]
        expected = [values[task][row["parent"]] if row["node"] else gamma * root_mean for task, row in at]
        counts = outcomes.weight * np.array([row["n_rollouts"] for _, row in at], dtype=np.float64)
        observed = [row["reward"] + gamma * values[task][row["node"]] for task, row in at]
        sums = counts * np.array([outcomes.scaled(one) for one in observed])
        means = np.array([outcomes.scaled(one) for one in expected])
        sampled = counts > 0
        s = strength(sums[sampled], counts[sampled], means[sampled]) if sampled.any() else PRIOR_STRENGTH
        for (task, row), total, count, mean in zip(at, sums * sampled, counts, means, strict=True):
            q = outcomes.low + outcomes.width * float((total + s * mean) / (count + s))
            values[task][row["node"]] = (q - row["reward"]) / gamma
    return values
