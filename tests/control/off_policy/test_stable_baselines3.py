"""Soft actor-critic against Stable-Baselines3's: the same functions of the same weights, and learning curves within intervals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.evaluation import mean_return
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.training import Training
from stages.control.off_policy.vector_task import VectorTask
from tests.control.learning_curves import POINTS, SEEDS, assert_curves_agree, baseline_curve, differences, our_curve

stable_baselines3 = pytest.importorskip("stable_baselines3")

STEPS, WARM_UP, BATCH, RATE = 5000, 500, 64, 2e-3


def baseline(seed: int = 0) -> Any:
    return stable_baselines3.SAC(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=RATE,
        batch_size=BATCH,
        learning_starts=WARM_UP,
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )


def copy_layers(layers: Any, ensemble: Any, member: int = 0) -> None:
    """Give an ensemble's member the weights of Stable-Baselines3's linear layers."""
    linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for layer, weight, bias in zip(linear, ensemble.weights, ensemble.biases, strict=True):
            weight[member].copy_(layer.weight.T)
            bias[member, 0].copy_(layer.bias)


def test_the_same_weights_give_the_same_values_actions_and_densities() -> None:
    model, agent = baseline(), Agent(OffPolicy(), 3, 1)
    for member, network in enumerate(model.critic.q_networks):
        copy_layers(network, agent.critics, member)
    actor = model.actor
    head = torch.nn.Linear(64, 2)
    with torch.no_grad():
        head.weight.copy_(torch.cat([actor.mu.weight, actor.log_std.weight]))
        head.bias.copy_(torch.cat([actor.mu.bias, actor.log_std.bias]))
    copy_layers([*actor.latent_pi, head], agent.policy.network)
    observation = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    action, log_density = agent.policy.sample(observation, torch.Generator().manual_seed(1))
    with torch.no_grad():
        values = torch.stack(model.critic(observation, action))[..., 0]
        assert torch.allclose(agent.critics(torch.cat([observation, action], -1))[..., 0], values, atol=1e-5)
        assert torch.allclose(agent.policy.greedy(observation), actor(observation, deterministic=True), atol=1e-5)
        mean, log_std, _ = actor.get_action_dist_params(observation)
        found = actor.action_dist.proba_distribution(mean, log_std).log_prob(action)
    assert torch.allclose(log_density, found, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_learning_curves_agree() -> None:
    """Areas under the curves and their ends, after the same steps with the same settings and evaluation, differ within their 99 %
    intervals, and both have learnt to swing the pendulum up."""
    ours, theirs = [], []
    task = VectorTask("Pendulum-v1", 20)
    settings = {"steps": STEPS, "evaluate_every": STEPS // POINTS, "warm_up": WARM_UP, "batch": BATCH, "learning_rate": RATE}
    for seed in range(SEEDS):
        training = Training(OffPolicy.model_validate({**settings, "seed": seed, "evaluate_episodes": 1}))
        ours.append(our_curve(training, lambda act: mean_return(act, task, 1)))
        model = baseline(seed)

        def greedy(seen: torch.Tensor, model: Any = model) -> torch.Tensor:
            return model.actor(seen, deterministic=True)

        theirs.append(baseline_curve(model, STEPS, lambda act=greedy: mean_return(act, task, 1)))
    print(ours, theirs, differences(ours, theirs))
    assert_curves_agree(ours, theirs, slack=10.0, learnt=-350.0)
