"""DQN: targets by hand with every head, exploration, exact resume, learning known values, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from stages.control.off_policy.dqn import Dqn
from stages.control.off_policy.dqn_settings import DeepQ
from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.training import Training
from stages.control.off_policy.vector_task import VectorTask
from stages.runtime.validation import ParamsError
from tests.control import bandits

SMALL: dict[str, Any] = {
    **{"task": "Bandit-v0", "steps": 400, "evaluate_every": 200, "warm_up": 40, "batch": 32, "width": 16, "layers": 1},
    **{"update_every": 8, "updates": 8, "learning_rate": 0.02, "evaluate_episodes": 20},
}
C51 = {"loss": "c51", "v_min": -2.0, "v_max": 2.0, "bins": 5}


def agent(**values: Any) -> Dqn:
    """Two observations, two actions; Q is the bias of the last layer whatever the observation."""
    torch.manual_seed(0)
    made = Dqn(DeepQ.model_validate({"layers": 1, "width": 4, **values}), 2, 2)
    for network in (made.network, made.target):
        torch.nn.init.zeros_(network.weights[-1])
    return made


def set_values(network: Any, values: list[float]) -> None:
    with torch.no_grad():
        network.biases[-1].copy_(torch.tensor([[values]]))


def one(reward: float, action: int, terminated: float = 0.0) -> Transitions:
    seen = torch.zeros(1, 2)
    return Transitions(seen, torch.tensor([[float(action)]]), torch.tensor([reward]), seen, torch.tensor([terminated]))


def test_targets_by_hand() -> None:
    """Q = (1, 3), Q' = (5, 2), gamma 0.5. r + gamma max Q' = 1 + 2.5; of action 0 the error is 2.5, of action 1 0.5. Double: the
    network prefers action 1, which the target network values at 2: 1 + 1. At the end only r counts."""
    plain = agent(gamma=0.5, huber=None)
    set_values(plain.network, [1.0, 3.0])
    set_values(plain.target, [5.0, 2.0])
    assert float(plain.loss(one(1.0, 0))) == pytest.approx(2.5**2)
    assert float(plain.loss(one(1.0, 1))) == pytest.approx(0.5**2)
    assert float(plain.loss(one(1.0, 1, terminated=1.0))) == pytest.approx(2.0**2)
    double = agent(gamma=0.5, huber=None, double=True)
    double.load_state_dict(plain.state_dict())
    assert float(double.loss(one(1.0, 1))) == pytest.approx(1.0**2)
    huber = agent(gamma=0.5)
    huber.load_state_dict(plain.state_dict())
    assert float(huber.loss(one(1.0, 0))) == pytest.approx(2.5 - 0.5)


def test_the_distribution_of_c51_by_hand() -> None:
    """Support -2 to 2. The target network is certain of the value 1 for both actions. With r = 0.5 and gamma 1 the target 1.5 is
    half way between two locations: the loss of a uniform prediction is log 5, and its gradient pulls at both."""
    made = agent(gamma=0.999999, head=C51)
    set_values(made.target, [*(0.0, 0.0, 0.0, 50.0, 0.0), *(0.0, 0.0, 0.0, 50.0, 0.0)])
    set_values(made.network, [0.0] * 10)
    loss = made.loss(one(0.5, 0))
    assert float(loss) == pytest.approx(torch.log(torch.tensor(5.0)).item(), abs=1e-4)
    loss.backward()
    gradient = made.network.biases[-1].grad[0, 0]
    assert torch.allclose(gradient[:5], torch.tensor([0.2, 0.2, 0.2, -0.3, -0.3]), atol=1e-4)
    assert not gradient[5:].any()


def test_exploration_falls_linearly_to_its_least() -> None:
    made = agent(steps=1000, evaluate_every=1000, warm_up=10, exploration=0.5, least_exploration=0.2)
    assert [made.exploration(steps) for steps in (0, 250, 500, 900)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


@pytest.mark.parametrize("head", [{"loss": "mse"}, {"loss": "hl_gauss", "v_min": -2.0, "v_max": 2.0, "bins": 21}, C51])
def test_it_learns_known_values_and_goes_on_exactly(head: dict[str, Any], tmp_path: Path) -> None:
    """The values of a task of one step are its rewards. A run that is ended after its first evaluation ends alike."""
    settings = DeepQ.model_validate({**SMALL, "head": head})
    whole = Training(settings)
    whole.train()
    assert torch.allclose(whole.agent.values(torch.eye(2)), torch.tensor(bandits.REWARDS).float(), atol=0.25)
    assert whole.returns[-1] > 0.6
    if head["loss"] != "mse":
        return
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
        ({"head": C51, "huber": 2.0}, "huber has no effect with head.loss: c51"),
        ({"update_every": 6, "environments": 4, "steps": 48, "evaluate_every": 48, "warm_up": 4}, "update_every 6 must be"),
        ({"steps": 100, "evaluate_every": 30}, "multiple of evaluate_every"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeepQ.model_validate(values)


def test_tasks_without_numbered_actions_are_refused() -> None:
    with pytest.raises(ParamsError, match="the agent needs numbered actions"):
        VectorTask("Pendulum-v1", 1, allowed="discrete")


def test_states_that_are_numbers_become_vectors() -> None:
    task = VectorTask("FrozenLake-v1", 2, allowed="discrete")
    seen = task.reset(0)
    assert seen.shape == (2, 16)
    assert (seen.sum(1) == 1.0).all()
    assert task.actions == 4
