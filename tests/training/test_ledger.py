"""The ledger: every policy token once per epoch, no other token ever."""

from __future__ import annotations

import pytest
import torch

from stages.training.common.ledger import Ledger

MASK = torch.tensor([[False, True, True], [False, True, False]])


def test_epoch_with_every_policy_token_once_is_counted():
    ledger = Ledger()
    for _ in range(2):
        ledger.open(MASK)
        ledger.record(torch.tensor([1]), MASK[1:, :2])
        ledger.record(torch.tensor([0]), MASK[:1])
        ledger.close()
    assert ledger.metrics() == {
        "ledger/policy_tokens_trained": 6,
        "ledger/environment_tokens_trained": 0,
        "ledger/policy_tokens_dropped": 0,
    }


@pytest.mark.parametrize(
    ("rows", "mask", "message"),
    [
        ([0], MASK[:1], "1 missing"),
        ([0, 1, 1], MASK[[0, 1, 1]], "1 used more than once"),
        ([0, 1], MASK | torch.tensor([True, False, False]), "2 tokens of prompt"),
    ],
)
def test_missing_repeated_or_wrong_tokens_are_errors(rows: list[int], mask: torch.Tensor, message: str):
    ledger = Ledger()
    ledger.open(MASK)
    for row, part in zip(rows, mask, strict=True):
        ledger.record(torch.tensor([row]), part[None])
    with pytest.raises(RuntimeError, match=message):
        ledger.close()


def test_dropped_rows_are_counted_separately_and_must_not_be_trained():
    ledger = Ledger()
    ledger.open(MASK, dropped=torch.tensor([True, False]))
    ledger.record(torch.tensor([1]), MASK[1:])
    ledger.close()
    assert (ledger.policy_tokens, ledger.dropped_tokens) == (1, 2)
    ledger.open(MASK, dropped=torch.tensor([True, False]))
    ledger.record(torch.tensor([0, 1]), MASK)
    with pytest.raises(RuntimeError, match="2 tokens of prompt"):
        ledger.close()


def test_tokens_of_a_skipped_step_are_accounted_for_and_not_trained():
    """One policy token is trained, two are of a step that was left out; two tokens of other streams are in no policy count."""
    ledger = Ledger()
    mask, external = MASK | torch.tensor([False, False, True]), torch.tensor([[False] * 3, [False, False, True]])
    observed = torch.tensor([[True, False, False], [False] * 3])
    ledger.open(mask, external=external, observed=observed)
    ledger.skip(torch.tensor([0]), torch.tensor([[True, True, True]]))
    ledger.record(torch.tensor([1]), mask[1:])
    ledger.close()
    assert ledger.metrics() == {
        "ledger/policy_tokens_trained": 1,
        "ledger/environment_tokens_trained": 0,
        "ledger/policy_tokens_dropped": 0,
        "ledger/policy_tokens_skipped": 2,
        "ledger/external_tokens_trained": 1,
    }
    ledger.open(MASK)
    ledger.skip(torch.tensor([0, 1]), MASK)
    ledger.record(torch.tensor([0]), MASK[:1])
    with pytest.raises(RuntimeError, match="2 used more than once"):
        ledger.close()


def test_incomplete_epoch_can_be_resumed_and_closed():
    ledger = Ledger()
    ledger.open(MASK)
    ledger.record(torch.tensor([0]), MASK[:1])
    again = Ledger()
    again.load_state_dict(ledger.state_dict())
    assert again.is_open
    again.close(complete=False)
    assert again.policy_tokens == 2
    with pytest.raises(RuntimeError, match="not open"):
        again.close()


def test_forced_evidence_and_guidance_are_counted_and_never_trained():
    owner = torch.tensor([[0, 1, 1, 4, 4, 5], [0, 1, 2, 6, 0, 0]])
    mask = owner == 1
    ledger = Ledger()
    for _ in range(2):
        ledger.open(mask, owner=owner)
        ledger.record(torch.tensor([0, 1]), mask)
        ledger.close()
    found = ledger.metrics()
    assert found["ledger/policy_tokens_trained"] == 6
    assert {name: count for name, count in found.items() if name.endswith("untrained")} == {
        "ledger/forced_tokens_untrained": 4,
        "ledger/evidence_tokens_untrained": 2,
        "ledger/guidance_tokens_untrained": 2,
    }
    with pytest.raises(RuntimeError, match="1 evidence tokens are among those to train"):
        ledger.open(mask | (owner == 5), owner=owner)
