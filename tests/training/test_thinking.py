"""rl with a reasoning policy: environments get the actions, and all tokens are trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages import rl
from stages.agent.policy import load_tokenizer
from stages.records.episode import Owner, read_rows
from stages.records.thinking import parse_turn
from training.test_horizon import RL


def test_rl_executes_actions_and_trains_all_sampled_tokens(make_context, tiny_policy: Path) -> None:
    """Contract: with `model.thinking`, the action of a turn is what follows its reasoning, and every sampled token is trained
    once. The markers are letters that a random policy often writes."""
    model = {"path": str(tiny_policy), "max_length": 128, "thinking": {"start": "o", "end": "e"}}
    settings = {**RL, "algorithm": "grpo", "steps": 2, "tasks_per_step": 8, "sampling": {"max_tokens": 8}}
    context = make_context("rl", rl=settings, model=model)
    rl.run(context)
    rows = read_rows(context.root / "data/rl/toy/samples.parquet")
    tokenizer, marks = load_tokenizer(tiny_policy), context.params.model.thinking
    acted = 0
    for row in rows:
        for turn in row["turns"]:
            ids = row["token_ids"][turn["start"] : turn["end"]]
            text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert turn["action"] == parse_turn(text, marks).action
            assert set(row["owner"][turn["start"] : turn["end"]]) == {int(Owner.POLICY)}
            acted += "e" in text and turn["action"] != text.strip()
        replies = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert all(turn["action"] in text for turn, text in zip(row["turns"], replies, strict=True))
    assert acted > 0
    metrics = context.tracker.metrics
    trained = metrics["ledger/policy_tokens_trained"][-1] + metrics["ledger/policy_tokens_dropped"][-1]
    drawn = sum(mean * count for mean, count in zip(metrics["policy_tokens"], metrics["episodes"], strict=True))
    assert trained == pytest.approx(drawn)
    assert metrics["ledger/environment_tokens_trained"][-1] == 0
