"""Step credit from the annotated value model."""

from __future__ import annotations

import pytest
import torch

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.credit import Credit, StepValues, TurnCredit, add_credit, turn_credit, with_turn_credit


def valued(make_batch, values: list[float], reward: float) -> TrajectoryBatch:
    """One episode of len(values) - 1 turns of two tokens; `values` before each turn and after the last."""
    batch = make_batch([[reward]], turns=[[2] * (len(values) - 1)])
    return batch.with_(advantages=torch.zeros(batch.mask.shape)).with_extra(StepValues(torch.tensor([values])))


def test_turn_credit_is_weighted_value_difference(make_batch) -> None:
    """V = (0.2, 0.5, 0.4), R = 1 at the end: turns get 0.3, -0.1 and 1 - 0.4 = 0.6, times the weight, on their tokens."""
    batch = valued(make_batch, [0.2, 0.5, 0.4, 0.0], 1.0)
    torch.testing.assert_close(turn_credit(batch), torch.tensor([[0.3, -0.1, 0.6]]))
    result = add_credit(batch, Credit(kind="annotated", weight=0.5)).advantages
    assert result is not None
    torch.testing.assert_close(result[batch.mask], torch.tensor([0.15, 0.15, -0.05, -0.05, 0.3, 0.3]))
    assert result[~batch.mask].abs().sum() == 0


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_credit_sum_does_not_depend_on_episode_length(make_batch, reward: float) -> None:
    """Contract: credits of an episode sum to R - V(s_0) whatever its length, and an idle turn gets exactly 0."""
    short = turn_credit(valued(make_batch, [0.2, 0.6, 0.0], reward))
    idle = turn_credit(valued(make_batch, [0.2, 0.6, 0.6, 0.6, 0.6, 0.0], reward))
    torch.testing.assert_close(short.sum(), torch.tensor(reward - 0.2))
    torch.testing.assert_close(idle.sum(), torch.tensor(reward - 0.2))
    assert idle[0, 1:4].tolist() == [0.0] * 3


def test_truncated_episode_gets_the_credit_of_a_failure(make_batch) -> None:
    """Contract: a truncated episode loses its value like a failed one, whatever V is after the last turn."""
    failed = valued(make_batch, [0.5, 0.5, 0.0], 0.0)
    cut = valued(make_batch, [0.5, 0.5, 0.5], 0.0).with_(truncated=torch.tensor([True]))
    torch.testing.assert_close(turn_credit(cut), turn_credit(failed))


def test_shorter_rows_end_at_their_own_last_turn(make_batch) -> None:
    batch = make_batch([[1.0, 0.0]], turns=[[1, 1, 1], [1]])
    batch = batch.with_extra(StepValues(torch.tensor([[0.1, 0.2, 0.3, 0.9], [0.4, 0.9, 0.9, 0.9]])))
    torch.testing.assert_close(turn_credit(batch), torch.tensor([[0.1, 0.1, 0.7], [-0.4, 0.0, 0.0]]))


def test_outcome_credit_is_a_no_op_and_annotated_needs_values(make_batch) -> None:
    batch = make_batch([[1.0]], turns=[[1, 1]])
    assert add_credit(batch, Credit(kind="outcome")) is batch
    with pytest.raises(ValueError, match="annotate"):
        add_credit(batch.with_(advantages=torch.zeros(batch.mask.shape)), Credit(kind="annotated"))


def test_what_credit_gave_each_turn_is_kept_for_readers(make_batch) -> None:
    """V = (0.2, 0.5, 0.4), R = 1, weight 0.5: 0.15, -0.05 and 0.3, whatever the advantages were. With progress, its rewards."""
    batch = valued(make_batch, [0.2, 0.5, 0.4, 0.0], 1.0)
    before = torch.full(batch.mask.shape, 0.7) * batch.mask
    params = Credit(kind="annotated", weight=0.5)
    given = with_turn_credit(add_credit(batch.with_(advantages=before), params), before, params).get(TurnCredit)
    assert given is not None
    torch.testing.assert_close(given.values, torch.tensor([[0.15, -0.05, 0.3]]))
    progress = with_turn_credit(batch.with_(turn_rewards=torch.tensor([[0.1, 0.2, 0.7]])), before, Credit(kind="progress"))
    assert progress.extra[TurnCredit].values.tolist() == torch.tensor([[0.1, 0.2, 0.7]]).tolist()
    assert with_turn_credit(batch, before, Credit(kind="outcome")) is batch
