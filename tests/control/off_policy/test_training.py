"""The off-policy loop: exact updates, exact resume, learning on a small task, refusals by name."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from torch import nn

from stages.control.off_policy import training
from stages.control.off_policy.agent import Agent
from stages.control.off_policy.evaluation import overestimation, soft_returns
from stages.control.off_policy.networks import Policy
from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.training import Training, run
from stages.control.off_policy.vector_task import VectorTask
from stages.runtime.validation import ParamsError
from stages.values.ensemble import Ensemble
from stages.values.pessimism import similarity

DSAC_T = {"critic": "gaussian", "delay": 2, "target_policy": True}
SMALL = {"steps": 60, "evaluate_every": 20, "warm_up": 10, "batch": 8, "width": 8, "evaluate_episodes": 1, "gamma": 0.9}


class Reach(gymnasium.Env):
    """One step: the reward is minus the distance between the action and the observation."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.goal = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.goal.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.goal.copy(), -abs(float(action[0] - self.goal[0])), True, False, {}


gymnasium.register("Reach-v0", Reach, max_episode_steps=3)


def batch(count: int, observations: int = 3, actions: int = 1) -> Transitions:
    generator = torch.Generator().manual_seed(count)
    shapes = ((observations,), (actions,), (), (observations,), ())
    made = Transitions(*(torch.rand(count, *shape, generator=generator) for shape in shapes))
    return Transitions(made.observation, made.action, made.reward, made.following, made.terminated.round())


def parameters(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def test_an_ensemble_is_its_members() -> None:
    torch.manual_seed(0)
    ensemble, inputs = Ensemble(3, 4, 8, 2, 2), torch.randn(5, 4)
    for number, found in enumerate(ensemble(inputs)):
        value = inputs
        for place, (weight, bias) in enumerate(zip(ensemble.weights, ensemble.biases, strict=True)):
            value = (value.relu() if place else value) @ weight[number] + bias[number]
        assert torch.allclose(found, value, atol=1e-6)


def test_log_densities_are_those_of_a_gaussian_through_tanh() -> None:
    torch.manual_seed(0)
    policy, observation = Policy(3, 2, 8, 1), torch.randn(6, 3)
    action, found = policy.sample(observation, torch.Generator().manual_seed(1))
    mean, log_std = policy(observation)
    through = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()), [torch.distributions.TanhTransform(cache_size=1)]
    )
    assert torch.allclose(found, through.log_prob(action).sum(-1), atol=1e-4)


def test_the_target_of_sac_by_hand() -> None:
    """Half the squared error of each critic against r + gamma (1 - d) (min Q' - alpha log pi'), summed over critics."""
    torch.manual_seed(0)
    settings = OffPolicy(gamma=0.9, alpha=0.5, width=8)
    agent, data = Agent(settings, 3, 1), batch(4)
    action, log_density = agent.policy.sample(data.following, torch.Generator().manual_seed(1))
    after = agent.slow_critics(torch.cat([data.following, action], -1))[..., 0]
    target = data.reward + 0.9 * (1 - data.terminated) * (torch.minimum(after[0], after[1]) - 0.5 * log_density)
    now = agent.critics(torch.cat([data.observation, data.action], -1))[..., 0]
    expected = 0.5 * ((now[0] - target) ** 2).mean() + 0.5 * ((now[1] - target) ** 2).mean()
    found = agent.critic_loss(data, torch.Generator().manual_seed(1))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_policys_loss_moves_no_critic() -> None:
    torch.manual_seed(0)
    agent = Agent(OffPolicy(width=8), 3, 1)
    agent.policy_loss(batch(4), torch.Generator()).backward()
    assert all(parameter.grad is None for parameter in agent.critics.parameters())
    assert all(parameter.grad is not None for parameter in agent.policy.parameters())


def test_delayed_updates() -> None:
    """After updates 0, 1, 2 with delay 2, the critics have moved three times, and the policy and the slow copies twice."""
    torch.manual_seed(0)
    agent = Agent(OffPolicy.model_validate({**DSAC_T, "width": 8}), 3, 1)
    parts = (agent.critics, agent.policy, agent.slow_critics, agent.slow_policy)
    moved = [0, 0, 0, 0]
    for number in range(3):
        before = [parameters(part) for part in parts]
        agent.update(batch(8), torch.Generator().manual_seed(number))
        moved = [
            count + int(not torch.equal(parameters(part), old)) for count, part, old in zip(moved, parts, before, strict=True)
        ]
    assert moved == [3, 2, 2, 2]


@pytest.mark.parametrize("values", [{}, DSAC_T, {"environments": 2, "tune_alpha": False, "replay": 30}])
def test_a_saved_run_goes_on_to_the_bit(values: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    settings = OffPolicy.model_validate({**SMALL, **values})
    whole = Training(settings)
    whole.train()
    first = Training(settings)
    first.round()
    first.save(path)
    second = Training(settings.model_copy(update={"checkpoint": str(path)}))
    second.train()
    assert second.returns == whole.returns
    assert second.steps == 60
    assert all(torch.equal(one, other) for one, other in zip(whole.agent.parameters(), second.agent.parameters(), strict=True))


def test_a_run_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    Training(OffPolicy.model_validate(SMALL)).save(path)
    with pytest.raises(ParamsError, match="of a run with other settings; remove it"):
        Training(OffPolicy.model_validate({**SMALL, "gamma": 0.8})).load(path)


def test_a_run_of_another_version_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    training = Training(OffPolicy.model_validate(SMALL))
    torch.save({"settings": training.identity(), **training.state()}, path)
    with pytest.raises(ParamsError, match="was written by another version of Bellwether; remove it"):
        training.load(path)


@pytest.mark.parametrize("content", [b"", b"steps: 40\n", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_saved_run_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(content)
    with pytest.raises(ParamsError, match=r"checkpoint: .*run\.pt is no saved run, or damaged; remove it"):
        Training(OffPolicy.model_validate({**SMALL, "checkpoint": str(path)})).train()
    torch.save([1], path)
    with pytest.raises(ParamsError, match="was written by another version"):
        Training(OffPolicy.model_validate(SMALL)).load(path)


def test_weights_that_diverge_end_the_run() -> None:
    """Contract: what learnt nothing but infinities ends with the setting to lower, not with figures or a failed decomposition."""
    training = Training(OffPolicy.model_validate({**SMALL, "learning_rate": 1e30}))
    with pytest.raises(ParamsError, match=r"learning_rate 1e\+30: weights are not finite after \d+ updates; lower it"):
        training.train()


def test_the_end_of_time_is_no_termination() -> None:
    """Pendulum ends only by its time limit: nothing stored is terminal, and what follows the last step is not the next start."""
    task = VectorTask("Pendulum-v1", 2)
    task.reset(1)
    outcomes = [task.step(np.zeros((2, 1), np.float32)) for _ in range(200)]
    assert not any(outcome.terminated.any() for outcome in outcomes)
    assert [outcome.ended.all() for outcome in outcomes] == [False] * 199 + [True]
    assert (outcomes[-1].following != outcomes[-1].observation).any(1).all()
    assert (outcomes[0].following == outcomes[0].observation).all()


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [([[2.0, 0.0]] * 3, 3.0), ([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]], 0.0), ([[1.0], [5.0], [-2.0]], -1.0)],
)
def test_similarity_of_gradients(gradients: list[list[float]], expected: float) -> None:
    assert similarity(torch.tensor(gradients)[:, None]).item() == pytest.approx(expected, abs=1e-5)


def test_diversity_parts_the_critics_gradients() -> None:
    found = []
    for diversity in (0.0, 10.0):
        torch.manual_seed(0)
        agent, data = Agent(OffPolicy(width=16, critics=4, diversity=diversity), 3, 2), batch(32, actions=2)
        for number in range(60):
            agent.update(data, torch.Generator().manual_seed(number))
        found.append(similarity(agent._action_gradients(data)).item())
    assert found[1] < found[0] - 0.5


def test_the_oldest_transitions_are_overwritten() -> None:
    replay = Replay(5, 3, 1)
    first, second = batch(4), batch(3)
    replay.add(first)
    replay.add(second)
    assert len(replay) == 5
    assert torch.equal(replay.kept.reward, torch.cat([second.reward[1:], first.reward[2:], second.reward[:1]]))


def test_soft_returns_by_hand() -> None:
    """The entropy's bonus of the next step counts, that of the own step does not; what is past the end does not either."""
    reward, bonus = np.array([[1.0], [2.0], [9.0]]), np.array([[5.0], [0.5], [9.0]])
    real = np.array([[True], [True], [False]])
    assert soft_returns(reward, bonus, real, 0.5)[:, 0].tolist() == [1 + 0.5 * 2.5, 2.0, 0.0]


@pytest.mark.parametrize("values", [{}, pytest.param(DSAC_T, marks=pytest.mark.slow)], ids=["sac", "dsac_t"])
def test_both_agents_learn_to_reach(values: dict[str, object]) -> None:
    """A random player's return is -1.04; scaled actions must fit, and Q of a policy with one step is near its reward."""
    settings = OffPolicy.model_validate(
        {**values, "task": "Reach-v0", "steps": 800, "evaluate_every": 400, "warm_up": 100, "batch": 64, "width": 32}
        | {"learning_rate": 3e-3, "alpha": 0.05, "tune_alpha": False, "evaluate_episodes": 20, "environments": 4}
    )
    figures = run(settings)
    assert figures["return_end"] > -0.25
    assert abs(figures["overestimation"]) < 0.3
    assert figures["updates"] == 700


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["scalar", "gaussian"])
def test_both_agents_swing_the_pendulum_up(critic: str) -> None:
    """A random player's return is about -1200; two critics' minimum errs to the low side."""
    settings = OffPolicy.model_validate(
        {"critic": critic, "steps": 5000, "evaluate_every": 1000, "warm_up": 500, "batch": 64, "learning_rate": 2e-3}
    )
    training = Training(settings)
    training.train()
    assert training.returns[-1] > -350
    assert -40 < overestimation(training.agent, settings) < 5


def test_the_command_writes_its_figures_and_removes_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**SMALL, "task": "Reach-v0"}
    settings, result, checkpoint = tmp_path / "settings.yaml", tmp_path / "result.json", tmp_path / "run.pt"
    settings.write_text(yaml.safe_dump({**values, "checkpoint": str(checkpoint)}))
    monkeypatch.setattr("sys.argv", ["training", "--settings", str(settings), "--result", str(result)])
    assert training.main() == 0
    expected = {f"control.{name}": value for name, value in run(OffPolicy.model_validate(values)).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}
    assert not checkpoint.exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 2500}, "must be a multiple of evaluate_every 2000"),
        ({"environments": 3}, "must be a multiple of environments 3"),
        ({"warm_up": 20_000}, "leaves no updates"),
        ({"gaussian": {"half": False}}, "gaussian has no effect with critic: scalar"),
        ({"critic": "gaussian", "gaussian": {"bound": 5.0}}, "bound has no effect with adjusted: true"),
        ({"critic": "gaussian", "gaussian": {"adjusted": False, "clip": 2.0}}, "clip has no effect"),
        ({"critics": 1, "diversity": 1.0}, "raise critics, or remove diversity"),
        ({"critic": "quantile"}, "Input should be 'scalar' or 'gaussian'"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OffPolicy.model_validate(values)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Pendulun-v1", "Gymnasium has no Pendulun-v1"),
        ("CartPole-v1", "the agent needs a vector of bounded numbers"),
        ("Blackjack-v1", "the agent needs a vector of numbers"),
        ("Ant-v2", r"Ant-v2 needs a package that is not installed \(.*moved"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(task: str, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        VectorTask(task, 1)


def test_tasks_of_mujoco_are_played() -> None:
    pytest.importorskip("mujoco")
    task = VectorTask("Hopper-v5", 2)
    assert task.reset(0).shape == (2, 11)
    outcome = task.step(np.zeros((2, 3), dtype=np.float32))
    assert outcome.following.shape == (2, 11)
    assert not outcome.terminated.any()


def test_without_gymnasium_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'bellwether\[gymnasium\]'"):
        VectorTask("Pendulum-v1", 1)


def test_a_copy_of_an_ensemble_has_layers_of_its_own() -> None:
    first = Ensemble(2, 3, 4, 1, 1)
    second = copy.deepcopy(first)
    inputs = torch.randn(5, 3)
    before = first(inputs)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(2.0)
    assert torch.equal(first(inputs), before)
    assert not torch.equal(second(inputs), before)
