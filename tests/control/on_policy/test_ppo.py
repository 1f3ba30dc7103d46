"""PPO: advantages and loss by hand, exact resume, learning a known task, refusals by name; the same numbers as the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from stages.control.on_policy.ppo import ActorCritic, Steps, advantages
from stages.control.on_policy.settings import Ppo
from stages.control.on_policy.training import Training
from tests.control import bandits

SMALL: dict[str, Any] = {
    **{"task": "Bandit-v0", "environments": 4, "horizon": 8, "steps": 640, "evaluate_every": 320, "batch": 16, "epochs": 6},
    **{"width": 16, "layers": 1, "learning_rate": 0.02, "evaluate_episodes": 20},
}


def test_advantages_by_hand() -> None:
    """gamma 0.5, lambda 0.5. The first episode ends by time after two steps, in a state that is worth 4; the second is over."""
    reward, value = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [1.0], [2.0]])
    after, ended = torch.tensor([[1.0], [4.0], [0.0]]), torch.tensor([[0.0], [1.0], [1.0]])
    found = advantages(reward, value, after, ended, 0.5, 0.5)
    last = 3.0 - 2.0
    middle = 2.0 + 0.5 * 4.0 - 1.0
    assert found[:, 0].tolist() == pytest.approx([1.0 + 0.5 - 1.0 + 0.25 * middle, middle, last])


def test_the_loss_by_hand() -> None:
    """Two actions with probabilities 1/2; one was drawn with 1/4, so that its ratio is 2, clipped at 1.2, where the advantage is
    positive; where it is negative, the worse one counts. V = 0."""
    made = ActorCritic(Ppo(normalise=False, value_weight=0.5, entropy=0.1, width=4), 2, 2, True)
    for head in (made.policy, made.value):
        torch.nn.init.zeros_(head.weight)
    quarter = torch.full((2,), 0.25).log()
    batch = Steps(torch.zeros(2, 2), torch.zeros(2, 1), quarter, torch.tensor([1.0, -1.0]), torch.tensor([2.0, 0.0]))
    expected = -(1.2 - 2.0) / 2 + 0.5 * (4.0 / 2) - 0.1 * np.log(2.0)
    assert float(made.loss(batch)) == pytest.approx(expected, rel=1e-5)


def test_advantages_of_a_batch_are_normalised() -> None:
    """Mean 0 and standard deviation 1, so that their offset and scale have no effect."""
    made = ActorCritic(Ppo(normalise=True, value_weight=0.0, width=4), 2, 2, True)
    seen, action, old = torch.randn(4, 2), torch.zeros(4, 1), torch.full((4,), 0.25).log()
    advantage = torch.tensor([1.0, -1.0, 3.0, 0.5])
    plain, other = (Steps(seen, action, old, one, torch.zeros(4)) for one in (advantage, 10.0 * advantage + 7.0))
    assert float(made.loss(plain)) == pytest.approx(float(made.loss(other)), abs=1e-5)
    standard = (advantage - advantage.mean()) / advantage.std()
    same = ActorCritic(Ppo(normalise=False, value_weight=0.0, width=4), 2, 2, True)
    same.load_state_dict(made.state_dict())
    assert float(made.loss(plain)) == pytest.approx(
        float(same.loss(Steps(seen, action, old, standard, torch.zeros(4)))), abs=1e-5
    )


def test_batches_are_all_steps_once_in_random_order() -> None:
    count = torch.arange(5.0)
    steps = Steps(count[:, None].expand(5, 2), -count[:, None], count + 10.0, count + 20.0, count + 30.0)
    generator = torch.Generator().manual_seed(0)
    batches = list(steps.shuffled(2, generator))
    assert [len(batch.returns) for batch in batches] == [2, 2, 1]
    order = torch.cat([batch.returns for batch in batches]) - 30.0
    assert sorted(order.tolist()) == count.tolist()
    assert order.tolist() != count.tolist()
    for batch in batches:
        row = batch.returns - 30.0
        assert torch.equal(batch.observation, row[:, None].expand(-1, 2))
        assert torch.equal(batch.action, -row[:, None])
        assert torch.equal(batch.log_density, row + 10.0)
        assert torch.equal(batch.advantage, row + 20.0)


def test_densities_of_continuous_actions_are_a_gaussian_s() -> None:
    made = ActorCritic(Ppo(width=4), 3, 2, False)
    seen, action = torch.randn(5, 3), torch.randn(5, 2)
    found = made(seen)[0]
    gaussian = torch.distributions.Normal(found, 1.0)
    assert torch.allclose(made.log_densities(found, action), gaussian.log_prob(action).sum(-1), atol=1e-5)
    assert torch.allclose(made.entropy(found), gaussian.entropy().sum(-1).mean(), atol=1e-5)


def test_it_learns_the_best_actions_and_goes_on_exactly(tmp_path: Path) -> None:
    settings = Ppo.model_validate(SMALL)
    whole = Training(settings)
    whole.train()
    assert whole.agent.greedy(torch.eye(2))[:, 0].tolist() == bandits.REWARDS.argmax(1).tolist()
    path = tmp_path / "run.pt"
    first = Training(settings.model_copy(update={"checkpoint": str(path)}))
    first.round()
    first.save(path)
    later = Training(settings.model_copy(update={"checkpoint": str(path)}))
    later.train()
    assert later.returns == whole.returns
    assert all(torch.equal(one, other) for one, other in zip(later.agent.parameters(), whole.agent.parameters(), strict=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evaluate_every": 5121}, "must be a multiple of environments times horizon, 256"),
        ({"steps": 5000}, "must be a multiple of evaluate_every"),
        ({"batch": 1}, "normalise needs batches of two steps or more, and batch 1 makes one of a single step"),
        ({"batch": 51}, "batch 51 makes one of a single step out of the 256 of an iteration.*; change batch, or set normalise"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Ppo.model_validate(values)
