"""Demonstrations as documents: trained tokens, steps of an epoch, independence of micro-batches."""

from __future__ import annotations

import pytest
import torch

from stages.agent.chat import Chat
from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy
from stages.training.common.documents import encode, epoch_batches, micro_batches, steps_per_epoch
from training.toys import demonstration, letter_tasks


@pytest.fixture(scope="module")
def policy(tiny_policy):
    return load_policy(tiny_policy, attention="sdpa")


@pytest.fixture(scope="module")
def documents(policy):
    actions = [("look",), ("open the door", "take the key"), ("go north", "look", "take the lamp")]
    shown = [demonstration(task, actions[index % 3]) for index, task in enumerate(letter_tasks(7))]
    return encode(Chat(policy.tokenizer), shown, 128)


def test_only_policy_turns_are_trained(policy, documents):
    """Contract: the masked tokens of a demonstration are its actions, each with its end-of-turn token."""
    text = policy.tokenizer.decode(documents.token_ids[1][documents.mask[1]])
    assert text == "open the door<|end|>take the key<|end|>"
    assert not documents.mask[:, 0].any()
    for row, length in enumerate(documents.lengths):
        assert documents.mask[row, length - 1]
        assert not documents.mask[row, length:].any()


def test_epoch_uses_every_document_once(documents):
    budget = sum(documents.lengths) // 3 + 1
    steps = epoch_batches(documents, budget, 0, "sft", 0)
    assert len(steps) == steps_per_epoch(documents, budget) == 3
    assert sorted(row for step in steps for row in step) == list(range(documents.size))
    assert steps != epoch_batches(documents, budget, 0, "sft", 1)
    assert len(epoch_batches(documents, 1, 0)) == documents.size
    assert all(epoch_batches(documents, 1, 0))


@pytest.mark.parametrize("tokens_per_batch", [64, 128, 4096])
def test_logprobs_are_independent_of_micro_batches(policy, documents, tokens_per_batch: int):
    """Contract: a row's log-probabilities do not depend on other rows or on padding."""
    whole = token_logprobs(policy.model, documents.token_ids, documents.mask)
    for rows in micro_batches(documents, range(documents.size), tokens_per_batch):
        part = token_logprobs(policy.model, *documents.take(rows))
        torch.testing.assert_close(part, whole[torch.tensor(rows), : part.shape[1]], rtol=0, atol=2e-6)


def test_errors_name_the_demonstration_and_the_key(policy):
    chat = Chat(policy.tokenizer)
    with pytest.raises(ValueError, match=r"toy-000/expert-0 .* model\.max_length"):
        encode(chat, [demonstration(letter_tasks(1)[0])], 8)
    with pytest.raises(ValueError, match="no demonstrations"):
        encode(chat, [], 8)
