"""Reward shaping: replaced returns, length and tool terms, stage scores, KL penalty."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.reward import Reward, kl_penalty, response_lengths, shape_rewards
from stages.algorithms.parts.shaping import PrsStage, dense, overlong_term, single, with_tool_bonus
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError


def test_environment_rewards_are_unchanged_by_default(make_batch) -> None:
    batch = make_batch([[1, 0]])
    assert shape_rewards(batch, Reward(kind="environment", density="environment")) is batch


def test_correct_and_wrong_replace_the_return_on_the_last_turn(make_batch) -> None:
    batch = make_batch([[1, 0.5]], turns=[[1, 2], [2]])
    shaped = shape_rewards(batch, Reward(correct=1.0, wrong=-1.0))
    assert shaped.rewards.tolist() == [1.0, -1.0]
    assert shaped.turn_rewards.tolist() == [[0.0, 1.0], [-1.0, 0.0]]
    assert shaped.metrics == {"shaped_reward": 0.0}
    assert batch.rewards.tolist() == [1.0, 0.5]


def test_response_length_includes_environment_tokens(make_batch) -> None:
    """Turns of 1 and 2 tokens, each followed by one environment token: 5 tokens after the prompt."""
    batch = make_batch([[1, 0]], turns=[[1, 2], [2]])
    assert response_lengths(batch).tolist() == [5, 3]
    silent = batch.with_(mask=torch.zeros_like(batch.mask))
    assert response_lengths(silent).tolist() == [0, 0]


def test_overlong_penalty_falls_on_the_last_turn(make_batch) -> None:
    batch = make_batch([[1, 0]], turns=[[1, 2], [2]])
    shaped = shape_rewards(batch, Reward(overlong_penalty=1.0, overlong_max=6, overlong_cache=4))
    torch.testing.assert_close(shaped.rewards, torch.tensor([0.25, -0.25]))
    torch.testing.assert_close(shaped.turn_rewards.sum(1), shaped.rewards)


def test_prs_stage_scores(make_batch) -> None:
    """parse: share of accepted actions, 0 if the tokens ran out; tool: whether one was called; otherwise the environment's
    term."""
    batch = make_batch([[1, 0, 0, 0.4]], turns=[[1, 1], [1, 1], [1], [1]])
    accepted = batch.accepted.clone()
    accepted[1, 0] = False
    batch = batch.with_(
        accepted=accepted,
        overlong=torch.tensor([False, False, True, False]),
        tool_calls=torch.tensor([2.0, 1.0, 0.0, 0.0]),
        terms={"f1": torch.tensor([1.0, 0.0, 0.0, 0.5])},
    )
    stages = [
        PrsStage(name="format", weight=0.1, term="parse"),
        PrsStage(name="tool", weight=0.1, no_call_score=0.5),
        PrsStage(name="f1", weight=0.8, threshold=0.0),
    ]
    shaped = shape_rewards(batch, Reward(kind="prs", prs=stages))
    assert shaped.terms["prs/format"].tolist() == [1.0, 0.5, 0.0, 1.0]
    assert shaped.terms["prs/tool"].tolist() == [1.0, 1.0, 0.5, 0.5]
    torch.testing.assert_close(shaped.rewards, torch.tensor([1.0, 0.05, 0.0, 0.15]))
    assert shaped.metrics["prs/f1"] == 0.375
    with pytest.raises(ValueError, match=r"bleu.*known: parse, tool, outcome, f1"):
        shape_rewards(batch, Reward(kind="prs", prs=[PrsStage(name="bleu", weight=1.0)]))


def test_tool_bonus_without_tool_calls_raises(make_batch) -> None:
    """Unknown tool calls must not become a constant."""
    batch = make_batch([[1, 0]]).with_(tool_calls=None)
    with pytest.raises(ValueError, match="tool_calls"):
        shape_rewards(batch, Reward(correct=1.0, wrong=-1.0, tool_bonus=0.1))


def test_kl_penalty_applies_to_policy_tokens(make_batch) -> None:
    batch = make_batch([[1, 0]], lengths=[2, 3])
    batch = kl_penalty(batch.with_(logprobs_ref=batch.logprobs_old - 0.5), Reward(kl_coef=0.1, kl_estimator="k1"))
    assert batch.token_rewards is not None
    torch.testing.assert_close(batch.token_rewards[batch.mask], torch.full((5,), -0.05))
    assert batch.token_rewards[~batch.mask].abs().sum() == 0


def test_shaping_functions() -> None:
    wrong, right = torch.tensor([False]), torch.tensor([True])
    assert with_tool_bonus(torch.tensor([-1.0]), wrong, torch.tensor([9.0]), 0.1, "wrong", -0.6).tolist() == pytest.approx([-0.6])
    assert with_tool_bonus(torch.tensor([1.0]), right, torch.tensor([9.0]), 0.1, "wrong", -0.6).tolist() == [1.0]
    assert overlong_term(torch.tensor([10, 15, 20, 99]), 20, 10, 2.0).tolist() == [0.0, -1.0, -2.0, -2.0]
    assert single(torch.tensor([True, False]), torch.tensor([2, 3]), 3).tolist() == [[0, 1, 0], [0, 0, 0]]
    increments = torch.tensor([[1.0, 0.0, 1.0]])
    assert dense(increments, right, "max_total", 4.0).tolist() == [[0.25, 0.0, 0.25]]


def test_the_default_length_limit_counts_the_prompt(make_batch) -> None:
    """A context of 6 tokens: an episode that fills it gets the whole penalty, whatever its prompt's share; a limit of one's own
    counts what comes after the prompt."""
    batch = make_batch([[1, 1]], lengths=[4, 2])
    full = int(batch.lengths[0])
    limits = {"context": {}, "response": {"overlong_max": full, "overlong_cache": 1}}
    for counted, more in limits.items():
        algorithm = resolve(Rl.model_validate({"algorithm": "dapo", "group_size": 2, "reward": more}), full)
        assert algorithm.rl.reward.overlong_of == counted
        gained = algorithm.shape(batch).rewards - batch.rewards
        assert gained[0].item() == (-1.0 if counted == "context" else 0.0)


@pytest.mark.parametrize("method", ["ssrl", "reseek", "router_r1", "ssp"])
@pytest.mark.parametrize("reward", [{"density": "single"}, {"correct": 1.0, "wrong": -1.0}])
def test_a_methods_own_reward_is_not_replaced(method: str, reward: dict[str, Any]) -> None:
    with pytest.raises(ParamsError, match="replace"):
        resolve(Rl.model_validate({"algorithm": method, "reward": reward}), 100)
