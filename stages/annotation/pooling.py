"""Labels from rollouts whose number the search chose: posterior means, pooled over the trees of a domain.

How many rollouts pass a node depends on what the first of them brought. A mean of what they brought is then biased: upwards over
nodes that passed `labels.min_visits` (the lucky were visited again), downwards over all nodes (the unlucky were not). A posterior
mean is not, since a likelihood does not ask why sampling went on: over any choice of nodes made by looking at outcomes, the
posterior mean is on average the truth, as far as the prior is right. The prior comes from the trees themselves (empirical Bayes):

    q(node) = (phi * sum of outcomes + s_d * V(parent)) / (phi * n + s_d)

for the n outcomes r + gamma * (rewards after the node) of a node at depth d: on average over the policy's actions Q(s, a) is
V(s). Outcomes are Beta-binomial on the range of returns; s_d, how alike siblings are at depth d, is the most probable of
STRENGTHS given all trees under a broad prior around USUAL; phi is 1 for outcomes at the ends of the range, 0 or 1, and larger the
less graded outcomes vary from rollout to rollout, infinite where they do not, which leaves the mean as it is. Roots are drawn
towards the mean over the trees, in the same way. An end is known.

Reduces to the plain mean as s_d -> 0 and as n grows. stages/claims/label_bias.py measures the bias in worlds where Q is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stages.annotation.nodes import Row, children_of, ended

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

STRENGTHS = 2.0 ** np.arange(-3, 9.01, 0.25)
"""Values of s_d that are tried: rollouts that the parent's value counts as."""
USUAL, BREADTH = 4.0, 1.5
"""The prior of log s_d: mean log USUAL, standard deviation BREADTH."""
EDGE = 1e-3
"""A prior mean nearer than this to the end of the range (as a share of it) would make outcomes at the other end impossible."""


class _Outcomes:
    """What the policy's rollouts brought from the action of each node on, scaled from `returns`, or the wider range that the
    nodes' means have, to [0, 1]."""

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
    """The most probable s of Beta(s m, s (1 - m)) priors with means [M] for shares that gave `successes` [M] of `counts` [M]; the
    numbers need not be whole."""
    from scipy.special import betaln

    m = means.clip(EDGE, 1 - EDGE)
    scores = []
    for s in STRENGTHS:
        a, b = s * m, s * (1 - m)
        likelihood = float((betaln(a + successes, b + counts - successes) - betaln(a, b)).sum())
        scores.append(likelihood - 0.5 * ((np.log(s) - np.log(USUAL)) / BREADTH) ** 2)
    return float(STRENGTHS[int(np.argmax(scores))])


def pooled_values(trees: Mapping[str, Sequence[Row]], params: Annotate) -> dict[str, list[float]]:
    """V of every node of every tree (by task, as `trees_of` has them): q = r + gamma V is the posterior mean; 0 at an end."""
    gamma, outcomes = params.gamma, _Outcomes(trees, params.gamma, params.returns)
    values = {task: [row["R"] / row["n_rollouts"] if row["n_rollouts"] else 0.0 for row in tree] for task, tree in trees.items()}
    if np.isinf(outcomes.weight) or not gamma:
        return values
    roots = [tree[0] for tree in trees.values() if tree[0]["n_rollouts"]]
    everywhere = sum(row["R"] for row in roots) / max(1, sum(row["n_rollouts"] for row in roots))
    children = {task: children_of(tree) for task, tree in trees.items()}
    level = [(task, 0) for task in trees]
    while at := [(task, trees[task][node]) for task, node in level if not ended(trees[task][node])]:
        level = [(task, child) for task, row in at for child in children[task][row["node"]]]
        expected = [values[task][row["parent"]] if row["node"] else gamma * everywhere for task, row in at]
        counts = outcomes.weight * np.array([row["n_rollouts"] for _, row in at], dtype=np.float64)
        brought = [row["reward"] + gamma * values[task][row["node"]] for task, row in at]
        sums = counts * np.array([outcomes.scaled(one) for one in brought])
        means = np.array([outcomes.scaled(one) for one in expected])
        tried = counts > 0
        s = strength(sums[tried], counts[tried], means[tried]) if tried.any() else USUAL
        for (task, row), total, count, mean in zip(at, sums * tried, counts, means, strict=True):
            q = outcomes.low + outcomes.width * float((total + s * mean) / (count + s))
            values[task][row["node"]] = (q - row["reward"]) / gamma
    return values
