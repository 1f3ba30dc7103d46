"""Pooled labels: posterior means over the trees of a forest, unbiased also for nodes that were revisited."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from tabular import EAGER, actions_of
from tabular import grow as grow_trees
from test_step_labels import row

from stages.annotation import pooling
from stages.annotation.forest import Forest
from stages.annotation.labels import label_rows
from stages.annotation.nodes import trees_of
from stages.annotation.pooling import pooled_values, strength
from stages.annotation.settings import Annotate
from stages.annotation.summary import summary
from stages.claims import label_bias
from stages.claims.known_tree import value
from stages.claims.label_bias import differences, grow, pooled
from stages.params import parse_params


@pytest.mark.slow
def test_labels_of_lazy_trees_are_unbiased() -> None:
    """Contract: over the labelled nodes of 480 trees of 16 iterations in worlds with known Q, the mean of label - Q is 0 at every
    depth for any min_visits; plain means are too high, since revisited nodes were lucky."""
    params = Annotate()
    forests = [grow(params, range(start, start + 48), seed=0) for start in range(0, 480, 48)]
    for visits, too_high in ((2, {3: 0.01, 4: 0.02}), (4, {2: 0.1, 3: 0.15, 4: 0.08})):
        gated = params.model_copy(update={"labels": params.labels.model_copy(update={"min_visits": visits})})
        found = pooled([differences(rows, gated) for rows in forests])
        for depth, least in too_high.items():
            assert found["counted", depth].mean - found["counted", depth].half > least
        for depth in range(1, 5):
            counted, label = found["counted", depth], found["label", depth]
            assert abs(label.mean) < max(0.02, 1.5 * label.half), (visits, depth, label)
            assert label.rmse < 0.9 * counted.rmse


def test_posterior_means_are_unbiased_under_optional_stopping() -> None:
    """Contract: for shares drawn from Beta(s m, s (1 - m)) and sampled until the first failure, at most six times, s is
    recovered, and over those sampled at least twice posterior means are unbiased where plain means are far too high."""
    rng = np.random.default_rng(0)
    count, s, m = 4000, 4.0, 0.4
    share = rng.beta(s * m, s * (1 - m), count)
    outcomes = rng.random((count, 6)) < share[:, None]
    drawn = np.minimum(1 + np.cumprod(outcomes, 1).sum(1), 6).astype(float)
    right = np.array([row[: int(n)].sum() for row, n in zip(outcomes, drawn, strict=True)], dtype=float)
    found = strength(right, drawn, np.full(count, m))
    assert 3.0 < found < 5.5
    again = drawn >= 2
    label = (right + found * m) / (drawn + found)
    assert (right / drawn - share)[again].mean() > 0.1
    assert abs((label - share)[again].mean()) < 0.01


def forest(**changes: Any) -> dict[str, list[Any]]:
    """Two trees: in the first the root's child succeeded in 3 of 4 rollouts, its child in 2 of 2; in the second all failed."""
    first = [row(0, -1, 8, 4), row(1, 0, 4, 3), row(2, 1, 2, 2), row(3, 2, 1, 1, end=True)]
    second = [row(0, -1, 8, 0, task_id="u"), row(1, 0, 4, 0, task_id="u")]
    return trees_of([{**one, **changes} for one in (*first, *second)])


def test_pooled_values_shrink_towards_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: q = (c + s V(parent)) / (n + s), where the root's parent is the mean over the trees; terminal values are
    exact."""
    monkeypatch.setattr(pooling, "strength", lambda *counts: 4.0)
    values = pooled_values(forest(), Annotate())
    root = (4 + 4 * 0.25) / 12
    child = (3 + 4 * root) / 8
    assert values["t"] == pytest.approx([root, child, (2 + 4 * child) / 6, 0.0])
    other = (0 + 4 * 0.25) / 12
    assert values["u"] == pytest.approx([other, 4 * other / 8])


def eager_tree(reward: float = 0.0) -> list[dict[str, Any]]:
    """No rollout starts at the root: 3 of 4 from its first child succeeded, 0 of 2 from its second, which pays `reward`."""
    return [row(0, -1, 6, 0, n_rollouts=0), row(1, 0, 4, 3), row(2, 0, 2, 0, reward=reward)]


def test_eager_trees_shrink_to_the_mean_of_the_roots_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: where no rollout starts at a root, its V is the mean outcome r + gamma R of its children's rollouts, not 0."""
    monkeypatch.setattr(pooling, "strength", lambda *counts: 4.0)
    values = pooled_values(trees_of(eager_tree()), Annotate(**EAGER))["t"]
    assert values == pytest.approx([0.5, (3 + 4 * 0.5) / 8, 4 * 0.5 / 6])
    monkeypatch.setattr(pooling, "strength", lambda *counts: 1e9)
    discounted = pooled_values(trees_of(eager_tree(reward=0.25)), Annotate(gamma=0.5, **EAGER))["t"]
    root = (0.5 * 3 + 2 * 0.25) / 6
    assert discounted[0] == pytest.approx(root)
    assert discounted[2] == pytest.approx((root - 0.25) / 0.5), "a strong prior leaves every child q = V(root)"


def test_labels_of_eager_trees_are_not_drawn_to_zero() -> None:
    """Contract: over 24 eager trees of known worlds, labels at depth 1 have the mean of the true Q, up to noise."""
    settings: dict[str, Any] = {"iterations": 16, **EAGER}
    trees = [tree for world in range(12) for tree in grow_trees([f"{world}a", f"{world}b"], world=world, **settings)]
    by_task = {tree.task_id: tree for tree in trees}
    found = []
    for label in label_rows([one for tree in trees for one in tree.rows()], Annotate(**settings)):
        tree = by_task[label["task_id"]]
        if label["depth"] == 1 and not tree.nodes[label["node"]].ended:
            found.append((label["q"], value(int(tree.task_id[:-1]), actions_of(tree, label["node"]))))
    label, true = np.mean(found, axis=0)
    assert len(found) == 24
    assert abs(label - true) < 0.06


def test_root_success_of_eager_trees_is_that_of_the_first_rollouts() -> None:
    """Contract: the report's success rate of the policy counts rollouts from the roots' children where none starts at a root."""
    forest = Forest([{**one, "task_id": "u"} for one in eager_tree()], [{"task_id": "u", "iterations": 6}])
    assert summary(forest, [], [], {})["root_success"] == 0.5
    lazy = Forest([row(0, -1, 8, 2), row(1, 0, 4, 2)], [{"task_id": "t", "iterations": 8}])
    assert summary(lazy, [], [], {})["root_success"] == 0.25


def test_pooling_accounts_for_step_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: children shrink towards their parent's reward-to-go after the step: with a cost of 1 per turn and outcomes from
    -4 to 0, the child's prior is the root's plus that cost, and labels differ only by their evidence."""
    monkeypatch.setattr(pooling, "strength", lambda *counts: 2.0)
    tree = [row(0, -1, 2, R=-2.0, R2=2.5), row(1, 0, 1, reward=-1.0, R=0.0, R2=0.0)]
    values = pooled_values(trees_of(tree), Annotate(returns=[-4.0, 0.0]))["t"]
    # Ratio of variances over nodes with several outcomes: 2 * 3/4 * 1/4 to (2.5 - 2^2 / 2) / 4^2.
    weight = (2 * 0.75 * 0.25) / (0.5 / 16)
    assert values[0] == pytest.approx(-1.0)
    q = (weight * -1.0 + 2 * -1.0) / (weight + 2)
    assert values[1] == pytest.approx(q + 1.0)


def test_deterministic_outcomes_are_not_shrunk() -> None:
    """Contract: where all rollouts from a node have the same return, strictly within the range, means are exact and kept."""
    tree = [row(0, -1, 4, R=1.2, R2=0.36), row(1, 0, 2, R=0.6, R2=0.18), row(2, 0, 2, R=1.0, R2=0.5)]
    assert pooled_values(trees_of(tree), Annotate())["t"] == pytest.approx([0.3, 0.3, 0.5])


@pytest.mark.parametrize(
    "settings",
    [
        {"labels": {"pool": False}},
        {"selection": {"rule": "flat"}, "evaluation": {"rollouts": 8}},
        {"selection": {"rule": "random"}},
    ],
)
def test_labels_are_plain_means_without_adaptive_sampling(settings: dict[str, Any]) -> None:
    """Contract: labels are plain means where the number of rollouts does not depend on outcomes, and with pool: false."""
    rows = [one for tree in forest().values() for one in tree]
    labels = label_rows(rows, Annotate(**settings))
    assert [label["q"] for label in labels] == [label["q_rollout"] for label in labels]
    assert [label["q"] for label in label_rows(rows, Annotate())] != [label["q"] for label in labels]


def test_similar_siblings_shrink_more() -> None:
    """Contract: similar siblings shrink to their parent more than different ones."""
    labels = defaultdict(list)
    for name, counts in (("alike", (2, 2)), ("apart", (4, 0))):
        rows = []
        for number in range(12):
            task = f"{name}{number:02d}"
            rows += [row(0, -1, 8, 4, task_id=task)]
            rows += [row(place, 0, 4, c, task_id=task) for place, c in enumerate(counts, start=1)]
        labels[name] = label_rows([*rows], Annotate())
    drawn = [abs(label["q"] - 0.5) for label in labels["apart"] if label["node"]]
    assert min(drawn) > 0.4
    assert max(abs(label["q"] - 0.5) for label in labels["alike"]) < 1e-9


def test_bias_is_measured_without_trees_in_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: by default the lifecycle grows no trees, and the command its own."""
    monkeypatch.setattr("stages.params.load_params", lambda: parse_params({"domains": ["search"], "per_domain": {"search": {}}}))
    monkeypatch.setattr("sys.argv", ["label_bias", "--worlds", "96", "--iterations", "4"])
    assert label_bias.main() == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["depth", "labels"]
    assert int(first.split()[1]) > 0
    assert "nan" not in first
