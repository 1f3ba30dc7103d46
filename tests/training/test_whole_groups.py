"""Micro-batches of whole groups, for methods whose loss compares the episodes of a group."""

from __future__ import annotations

import copy

import pytest
import torch

from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.settings import Rl
from stages.runtime.resources import Resources
from stages.training.common.batches import plan_whole_groups, trajectory_batch
from stages.training.common.ledger import Ledger
from stages.training.common.loop import make_processes
from stages.training.rl.models import Models
from stages.training.rl.policy_updates import PolicyUpdates
from training.toys import make_episode


@pytest.fixture(scope="module")
def model(tiny_policy):
    return load_policy(tiny_policy, attention="sdpa").model


def make_batch() -> TrajectoryBatch:
    shapes = [("a", [3, 2], 1.0), ("b", [4], 0.0), ("a", [1], 0.0), ("b", [2, 2, 1], 1.0), ("c", [2], 1.0), ("c", [3], 0.0)]
    return trajectory_batch([make_episode(f"{index}", *shape) for index, shape in enumerate(shapes)])


def test_groups_are_not_split():
    group = torch.tensor([0, 0, 1, 1, 1, 2])

    def at_most_three(rows) -> list[list[int]]:
        return [list(rows[start : start + 3]) for start in range(0, len(rows), 3)]

    assert plan_whole_groups(group, range(6), at_most_three) == [[0, 1], [2, 3, 4], [5]]
    assert plan_whole_groups(group, [0, 1, 5, 2, 3], at_most_three) == [[0, 1, 5], [2, 3]]
    assert plan_whole_groups(group, range(6), lambda rows: [[row] for row in rows]) == [[0, 1], [2, 3, 4], [5]]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tokens_per_batch", [4096, 20, 1])
def test_micro_batches_keep_groups_whole_and_do_not_change_the_loss(model, share: bool, tokens_per_batch: int):
    """Contract: with any token budget, and with prefixes shared or not, loss and gradient equal those of one micro-batch."""
    found = []
    for budget, sharing in ((4096, False), (tokens_per_batch, share)):
        trained = copy.deepcopy(model)
        algorithm = resolve(Rl(algorithm="pacs", group_size=2, share_prefixes=sharing))
        models = Models.make(algorithm, trained, None, make_processes(Resources()), budget)
        batch = make_batch()
        now = models.logprobs(models.reference, batch, range(6), 1.0)
        batch = batch.with_(logprobs_old=now - 0.05 * batch.mask * batch.group[:, None])
        batch = algorithm.prepare(models.annotate(batch, algorithm))
        update = next(PolicyUpdates(models, algorithm, Ledger()).updates(batch, 0, ("key",)))
        assert sorted(row for rows in update.micro_batches for row in rows) == list(range(6))
        for rows in update.micro_batches:
            assert sorted(rows) == [row for row in range(6) if int(batch.group[row]) in set(batch.group[rows].tolist())]
        if budget == 1:
            assert len(update.micro_batches) == 3
        total = 0.0
        for rows in update.micro_batches:
            for terms in update.loss(rows):
                terms.loss.backward()
                total += float(terms.loss.detach())
        found.append((total, torch.cat([parameter.grad.flatten() for parameter in trained.parameters()])))
    (whole_loss, whole), (loss, gradient) = found
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert float((gradient - whole).norm() / whole.norm()) < 1e-4
