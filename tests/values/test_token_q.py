"""Token values that score whole actions: the recovered reward by hand, saving, scoring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stages.agent.best_of_n import by_logprob, per_token
from stages.agent.policy import load_policy, save_policy
from stages.engine.engine import Turn
from stages.values.token_q import Scale, TokenQ, bounded, load_token_q, recovered


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Any:
    return load_policy(tiny_policy, attention="sdpa")


def token_q(policy: Any, **scale: float) -> TokenQ:
    """A TokenQ with random heads."""
    generator = torch.Generator().manual_seed(1)
    heads = []
    for _ in range(2):
        head = nn.Linear(policy.model.config.hidden_size, 1)
        head.weight.data = torch.randn(head.weight.shape, generator=generator) * 0.3
        head.bias.data.fill_(0.5)
        heads.append(head)
    backbone = load_policy(policy.folder, attention="sdpa").model.base_model
    for parameter in backbone.parameters():
        parameter.data += 0.01
    return TokenQ(policy.model, backbone, *heads, Scale(**scale)).eval()


def test_recovered_reward_telescopes() -> None:
    """A = [0, -0.5, -0.2], V = [0.3, 0.1, -0.4], gamma 1: r~ = [0.2, 0, -0.6], whose sum is 0.3 - 0.7."""
    advantage, value = torch.tensor([0.0, -0.5, -0.2]), torch.tensor([0.3, 0.1, -0.4])
    found = recovered(advantage, value, torch.tensor([0.1, -0.4, 0.0]), 1.0)
    torch.testing.assert_close(found, torch.tensor([0.2, 0.0, -0.6]))
    assert float(found.sum()) == pytest.approx(float(value[0] + advantage.sum())) == pytest.approx(-0.4)


HISTORY = [1, 40, 41, 2]
ACTIONS = [[50, 51, 3], [52, 3], [50, 51, 53, 54, 3]]


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_rewards_equal_those_of_full_forward_passes(policy: Any, gamma: float) -> None:
    """Contract: encoding the history once gives the rewards of full forward passes; with gamma 1 the sum is V before the action
    plus its advantages, so that V does not affect the choice between actions of one history."""
    model = token_q(policy, gamma=gamma, alpha=2.0)
    rewards, advantage, real = model.rewards(HISTORY, ACTIONS)
    for row, action in enumerate(ACTIONS):
        ids = torch.tensor([HISTORY + action])
        with torch.no_grad():
            logs = policy.model(ids).logits[0, len(HISTORY) - 1 : -1].log_softmax(-1)
            states = policy.model.base_model(ids).last_hidden_state[0, len(HISTORY) - 1 : -1]
            own = model.backbone(ids).last_hidden_state[0, len(HISTORY) - 1 : -1]
            value = bounded((model.output(own) + model.residual(states))[:, 0], 1.0)
        expected = 2.0 * (logs[range(len(action)), action] - logs.amax(-1))
        torch.testing.assert_close(advantage[row, : len(action)], expected, atol=1e-4, rtol=1e-4)
        after = torch.cat([value[1:], torch.zeros(1)])
        torch.testing.assert_close(rewards[row, : len(action)], expected + value - gamma * after, atol=1e-4, rtol=1e-4)
        assert not real[row, len(action) :].any()
        assert not rewards[row, len(action) :].any()
    scores = model.scores(HISTORY, ACTIONS)
    torch.testing.assert_close(scores, rewards.sum(1))
    if gamma == 1.0:
        first = float(value[0])
        torch.testing.assert_close(scores, first + advantage.sum(1), atol=1e-4, rtol=1e-4)


def test_saved_token_q_is_restored(policy: Any, tmp_path: Path) -> None:
    """It is saved below the policy's folder, which stays loadable and whose hash does not change."""
    model = token_q(policy, gamma=0.9, alpha=0.5, r_max=2.0)
    with pytest.raises(FileNotFoundError, match=r"rl\.algorithm to b_coder"):
        load_token_q(tmp_path)
    save_policy(policy.model, policy.tokenizer, tmp_path / "policy")
    before = load_policy(tmp_path / "policy").hash
    model.save(tmp_path / "policy")
    again = load_token_q(tmp_path / "policy")
    assert again.scale == Scale(0.5, 0.9, 2.0)
    torch.testing.assert_close(again.scores(HISTORY, ACTIONS), model.scores(HISTORY, ACTIONS))
    assert load_policy(tmp_path / "policy").hash == before
    files = sorted(path.name for path in (tmp_path / "policy" / "value").iterdir())
    assert files == ["config.json", "heads.safetensors", "model.safetensors", "value.json"]


def test_scores_per_token() -> None:
    """evaluate.best_of.per_token: sums favour the short action, means the long one."""
    turns = [Turn(0, [1, 2, 3, 4], [-0.5] * 4, "stop"), Turn(1, [1, 2], [-0.9] * 2, "stop")]
    assert by_logprob([], turns) == pytest.approx([-2.0, -1.8])
    assert per_token(by_logprob)([], turns) == pytest.approx([-0.5, -0.9])
