"""PPO against Stable-Baselines3's: the same advantages and weights after an update, and learning curves within intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stages.control.off_policy.evaluation import mean_return
from stages.control.off_policy.vector_task import VectorTask
from stages.control.on_policy.ppo import ActorCritic, Steps, advantages
from stages.control.on_policy.settings import Ppo
from stages.control.on_policy.training import Training
from tests.control.learning_curves import POINTS, SEEDS, assert_curves_agree, baseline_curve, differences

stable_baselines3 = pytest.importorskip("stable_baselines3")

STEPS = 10_240
SETTINGS = {"entropy": 0.01, "epochs": 10, "steps": STEPS, "evaluate_every": STEPS // POINTS}


def baseline(seed: int = 0) -> Any:
    from stable_baselines3.common.env_util import make_vec_env

    return stable_baselines3.PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 8, seed=seed),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=10,
        ent_coef=0.01,
        learning_rate=1e-3,
        clip_range=0.2,
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )


def pairs(agent: ActorCritic, model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Our weights and theirs."""
    extractor, found = model.policy.mlp_extractor, []
    for member, network in enumerate((extractor.policy_net, extractor.value_net)):
        linear = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
        for layer, weight, bias in zip(linear, agent.trunk.weights, agent.trunk.biases, strict=True):
            found += [(weight[member], layer.weight.T), (bias[member, 0], layer.bias)]
    for ours, theirs in ((agent.policy, model.policy.action_net), (agent.value, model.policy.value_net)):
        found += [(ours.weight, theirs.weight), (ours.bias, theirs.bias)]
    return found


def test_an_update_on_the_same_batch_gives_the_same_weights() -> None:
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.type_aliases import RolloutBufferSamples

    model, agent = baseline(), ActorCritic(Ppo.model_validate(SETTINGS), 4, 2, True)
    with torch.no_grad():
        for ours, theirs in pairs(agent, model):
            ours.copy_(theirs)
    generator = torch.Generator().manual_seed(0)
    seen, action = torch.randn(256, 4, generator=generator), torch.randint(2, (256, 1), generator=generator)
    with torch.no_grad():
        value, log_density, entropy = model.policy.evaluate_actions(seen, action[:, 0])
        found, mine = agent(seen)
        assert torch.allclose(mine, value[:, 0], atol=1e-6)
        assert torch.allclose(agent.log_densities(found, action), log_density, atol=1e-6)
        assert torch.allclose(agent.entropy(found), entropy.mean(), atol=1e-6)
    old = log_density + 0.3 * torch.randn(256, generator=generator)
    advantage, returns = (torch.randn(256, generator=generator) for _ in range(2))
    samples = RolloutBufferSamples(seen, action.float(), value[:, 0], old, advantage, returns)
    model.set_logger(configure(None, []))
    model.n_epochs, model.rollout_buffer.get = 1, lambda _: [samples]
    for _ in range(3):
        agent.update(Steps(seen, action.float(), old, advantage, returns))
        model.train()
    for ours, theirs in pairs(agent, model):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_advantages_are_those_of_its_buffer() -> None:
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import RolloutBuffer

    rng = np.random.default_rng(0)
    steps, count = 7, 3
    buffer = RolloutBuffer(steps, Box(-1, 1, (2,)), Discrete(2), "cpu", gae_lambda=0.8, gamma=0.98, n_envs=count)
    reward, value, last = rng.normal(size=(steps, count)), rng.normal(size=(steps, count)), rng.normal(size=count)
    ended = rng.random((steps, count)) < 0.3
    starts = np.vstack([np.ones((1, count)), ended[:-1]])
    for step in range(steps):
        row, zeros = torch.tensor(value[step]), np.zeros((count, 2))
        buffer.add(zeros, np.zeros((count, 1)), reward[step], starts[step], row, torch.zeros(count))
    buffer.compute_returns_and_advantage(torch.tensor(last), ended[-1])
    after = torch.tensor(np.vstack([value[1:], last]) * ~ended)
    columns = (torch.tensor(one) for one in (reward, value))
    found = advantages(*columns, after, torch.tensor(ended).double(), 0.98, 0.8)
    assert np.allclose(found.numpy(), buffer.advantages, atol=1e-5)


def curve(training: Training, evaluate: Callable[[Any], float]) -> list[float]:
    """After each of POINTS equal parts of the steps. Episodes go on, as in Stable-Baselines3: `Training.round` begins new ones,
    here after 256 steps of an environment, so that the agent would not see the second half of a long one."""
    observation = training.task.reset(training.settings.seed)
    found: list[float] = []
    while not training.done:
        batch, observation = training.collect(observation)
        training.learn(batch)
        if training.steps % (STEPS // POINTS) == 0:
            found.append(evaluate(training.agent.greedy))
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_learning_curves_agree() -> None:
    """Areas under the curves and their ends, after the same steps with the same settings and evaluation, differ within their 99 %
    intervals, and both have learnt to balance the pole."""
    ours, theirs = [], []
    task = VectorTask("CartPole-v1", 20, allowed="discrete")
    for seed in range(SEEDS):
        training = Training(Ppo.model_validate({**SETTINGS, "seed": seed, "evaluate_episodes": 1}))
        ours.append(curve(training, lambda act: mean_return(act, task, 1)))
        model = baseline(seed)

        def greedy(seen: torch.Tensor, model: Any = model) -> torch.Tensor:
            return torch.from_numpy(model.predict(seen.numpy(), deterministic=True)[0][:, None]).float()

        theirs.append(baseline_curve(model, STEPS, lambda act=greedy: mean_return(act, task, 1)))
    print(ours, theirs, differences(ours, theirs))
    assert_curves_agree(ours, theirs, slack=10.0, learnt=100.0)
