"""Loss weights of a sample's tokens: full for answers, reduced for what can't be predicted."""

from __future__ import annotations

import pytest

from stages.agent.chat import Chat as ChatFormat
from stages.pretraining.corpus import Chat, lookups
from stages.pretraining.job import encode
from stages.pretraining.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    families = {"words": 1.0, "pairs": 1.0, "recall": 1.0}
    texts = [text for sample in lookups(400, 5, families) for _, text in sample.messages]
    return ChatFormat(train_tokenizer(texts, 700, 512))


def text_with_weight(chat: ChatFormat, sample: Chat, weight: float = 1.0) -> str:
    encoded = encode(chat, sample, 512, context_weight=0.25)
    return chat.tokenizer.decode([token for token, w in zip(encoded.token_ids, encoded.weights, strict=True) if w == weight])


def test_in_a_list_of_pairs_only_second_items_have_full_weight(chat: ChatFormat) -> None:
    """Contract: `answers` selects words; their commas, the first items and the end of the turn weigh `context_weight`."""
    sample = Chat(
        "pairs",
        (("user", "owl fox, Dorvin Kelmar, owl12 fox34"), ("assistant", "owl12 fox34, owl fox, Dorvin Kelmar")),
        (False, True) * 3,
    )
    assert text_with_weight(chat, sample).split() == ["fox34", "fox", "Kelmar"]
    assert "owl12" in text_with_weight(chat, sample, 0.25)


def test_without_answers_every_word_of_the_reply_has_full_weight(chat: ChatFormat) -> None:
    """Contract: answers None selects the entire assistant text and its end-of-turn token."""
    sample = Chat("recall", (("user", "owl fox, owl"), ("assistant", "fox")))
    assert text_with_weight(chat, sample).split() == ["fox<|end|>"]


def test_random_actions_weigh_no_more_than_their_context(chat: ChatFormat) -> None:
    """Contract: the actions of random play are context, not answers."""
    sample = Chat("transcript", (("user", "owl fox"), ("assistant", "fox"), ("user", "owl"), ("assistant", "fox")))
    assert text_with_weight(chat, sample) == ""


def test_lists_of_pairs_mark_every_second_word() -> None:
    """Contract: a generated list has one flag per word."""
    for sample in lookups(50, 3, {"words": 1.0, "pairs": 1.0}):
        assert sample.answers is not None
        assert len(sample.answers) == len(sample.messages[1][1].split(" "))
        assert sample.answers[:2] == (False, True)
