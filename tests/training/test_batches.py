"""Episodes to tensors, micro-batches, minibatches, turn boundaries."""

from __future__ import annotations

import pytest
import torch

from stages.training.common.batches import minibatches, plan_micro_batches, take, trajectory_batch, turn_boundaries, turn_starts
from training.toys import make_episode


def test_batch_holds_the_tokens_of_its_episodes():
    batch = trajectory_batch([make_episode("a", "g", [2, 1], 1.0), make_episode("b", "h", [1], 0.0)])
    assert batch.token_ids.tolist() == [[5, 6, 10, 11, 7, 10], [5, 6, 10, 0, 0, 0]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0]]
    assert batch.turn.tolist() == [[-1, -1, 0, 0, 0, 1], [-1, -1, 0, -1, -1, -1]]
    assert batch.logprobs_old.tolist() == [[0, 0, -0.5, -0.5, 0, -0.5], [0, 0, -0.5, 0, 0, 0]]
    assert (batch.lengths.tolist(), batch.turns.tolist(), batch.group.tolist()) == ([6, 3], [2, 1], [0, 1])
    assert batch.turn_rewards.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert turn_boundaries(batch).tolist() == [[1, 4], [1, -1]]
    assert turn_starts(batch).int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0]]
    assert take(batch, [1]).token_ids.tolist() == [[5, 6, 10]]


def test_turn_boundaries_are_on_the_batch_device():
    """Contract: also if that is not the default device."""
    batch = trajectory_batch([make_episode("a", "g", [2, 1], 1.0), make_episode("b", "h", [1], 0.0)])
    with torch.device("meta"):
        boundaries = turn_boundaries(batch)
    assert boundaries.device == batch.mask.device


def test_malformed_episodes_are_rejected_by_name():
    episode = make_episode("a", "g", [2], 1.0)
    episode.reward = 0.5
    with pytest.raises(ValueError, match="episode a: reward"):
        trajectory_batch([episode])
    episode = make_episode("b", "g", [2], 1.0)
    episode.owner.pop()
    with pytest.raises(ValueError, match="episode b: token_ids"):
        trajectory_batch([episode])
    with pytest.raises(ValueError, match="no episodes"):
        trajectory_batch([])


def test_micro_batches_hold_every_row_once_within_their_size():
    lengths = [30, 5, 17, 30, 64, 8, 8]
    plan = plan_micro_batches(lengths, 60)
    assert sorted(row for group in plan for row in group) == list(range(7))
    assert plan == [[4], [0, 3], [2, 5, 6], [1]]
    assert all(len(group) * max(lengths[row] for row in group) <= 60 for group in plan[1:])


def test_minibatches_are_whole_groups():
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    parts = minibatches(group, 2, [3, 1, 0, 4, 2])
    assert parts == [[0, 1, 2, 3, 6, 7], [4, 5, 8, 9]]
    assert minibatches(group, 1, [0, 1, 2, 3, 4]) == [list(range(10))]
