"""DQN against Stable-Baselines3's: the same weights after an update on the same batch, and learning curves within intervals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.control.off_policy.dqn import Dqn
from stages.control.off_policy.dqn_settings import DeepQ
from stages.control.off_policy.evaluation import mean_return
from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.training import Training
from stages.control.off_policy.vector_task import VectorTask
from tests.control.learning_curves import POINTS, SEEDS, assert_curves_agree, baseline_curve, differences, our_curve

stable_baselines3 = pytest.importorskip("stable_baselines3")

STEPS = 15_360
"""A multiple of POINTS times 256, the steps between updates."""
SETTINGS = {"width": 64, "batch": 64, "learning_rate": 2.3e-3, "warm_up": 1000, "steps": STEPS, "evaluate_every": STEPS // POINTS}


def baseline(seed: int = 0) -> Any:
    return stable_baselines3.DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=SETTINGS["learning_rate"],
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )


def weights(network: Any) -> list[torch.Tensor]:
    return [part for layer in network.q_net if isinstance(layer, torch.nn.Linear) for part in (layer.weight.T, layer.bias)]


def ours(ensemble: Any) -> list[torch.Tensor]:
    pairs = zip(ensemble.weights, ensemble.biases, strict=True)
    return [part for weight, bias in pairs for part in (weight[0], bias[0, 0])]


def test_an_update_on_the_same_batch_gives_the_same_weights() -> None:
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    model, agent = baseline(), Dqn(DeepQ.model_validate(SETTINGS), 4, 2)
    for network, theirs in ((agent.network, model.q_net), (agent.target, model.q_net_target)):
        with torch.no_grad():
            for part, value in zip(ours(network), weights(theirs), strict=True):
                part.copy_(value)
    generator = torch.Generator().manual_seed(0)
    seen, following = (torch.randn(64, 4, generator=generator) for _ in range(2))
    action = torch.randint(2, (64, 1), generator=generator)
    reward, over = torch.randn(64, generator=generator) * 3.0, (torch.rand(64, generator=generator) < 0.2).float()
    with torch.no_grad():
        assert torch.allclose(agent.values(seen), model.q_net(seen), atol=1e-6)
    model.set_logger(configure(None, []))
    samples = ReplayBufferSamples(seen, action, following, over[:, None], reward[:, None], None)
    model.replay_buffer.sample = lambda *_, **__: samples
    before = ours(agent.network)[0].clone()
    for _ in range(3):
        agent.update(Transitions(seen, action.float(), reward, following, over), generator)
        model.train(gradient_steps=1, batch_size=64)
    assert not torch.allclose(before, ours(agent.network)[0], atol=1e-3)
    for part, value in zip(ours(agent.network), weights(model.q_net), strict=True):
        assert torch.allclose(part, value, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_learning_curves_agree() -> None:
    """Areas under the curves and their ends, after the same steps with the same settings and evaluation, differ within their 99 %
    intervals, and both have learnt to balance the pole."""
    ours, theirs = [], []
    task = VectorTask("CartPole-v1", 20, allowed="discrete")
    for seed in range(SEEDS):
        training = Training(DeepQ.model_validate({**SETTINGS, "seed": seed, "evaluate_episodes": 1}))
        ours.append(our_curve(training, lambda act: mean_return(act, task, 1)))
        model = baseline(seed)

        def greedy(seen: torch.Tensor, model: Any = model) -> torch.Tensor:
            with torch.no_grad():
                return model.q_net(seen).argmax(-1, keepdim=True).float()

        theirs.append(baseline_curve(model, STEPS, lambda act=greedy: mean_return(act, task, 1)))
    print(ours, theirs, differences(ours, theirs))
    assert_curves_agree(ours, theirs, slack=10.0, learnt=60.0)
