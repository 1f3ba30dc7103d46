"""off_policy_updates and off_policy_steps: soft actor-critic on Pendulum-v1, against Stable-Baselines3 with the same networks,
batch size and learning rate: updates alone, and the whole loop of one step and one update.

Before anything is measured, both sides' critics get the same weights, and their values of the same transitions are compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.measure import Options, Result, Side, alternate
from benchmarks.startup import SkippedError

AGAINST = "Stable-Baselines3 SAC"
TASK, WIDTH, BATCH, RATE = "Pendulum-v1", 64, 256, 1e-3
FILLED = 1000
"""Transitions in the replay buffers before anything is measured."""
APART = 1e-4
"""Most difference between both sides' values of the same actions, with the same weights."""


def ours(options: Options) -> Any:
    """A run that has filled its replay buffer."""
    from stages.control.off_policy.settings import OffPolicy
    from stages.control.off_policy.training import Training

    steps = FILLED * 1000
    settings = {"task": TASK, "steps": steps, "evaluate_every": steps, "warm_up": FILLED}
    training = Training(OffPolicy.model_validate({**settings, "width": WIDTH, "batch": BATCH, "learning_rate": RATE}))
    training.observation = training.task.reset(0)
    play(training, FILLED)
    return training


def play(training: Any, steps: int) -> None:
    for _ in range(steps):
        training.observation = training.step(training.observation)


def theirs(options: Options) -> Any:
    """Stable-Baselines3's SAC with the same settings, after as many steps. Raises SkippedError without it."""
    try:
        from stable_baselines3 import SAC
    except ModuleNotFoundError as error:
        raise SkippedError("Stable-Baselines3 is not installed; pip install 'bellwether[control]'") from error
    model = SAC(
        "MlpPolicy",
        TASK,
        learning_rate=RATE,
        batch_size=BATCH,
        learning_starts=FILLED,
        policy_kwargs={"net_arch": [WIDTH, WIDTH]},
        seed=0,
        device="cpu",
    )
    model.learn(FILLED, reset_num_timesteps=True)
    return model


def copy_weights(agent: Any, model: Any) -> None:
    """Give Stable-Baselines3's critics and their targets our weights."""
    with torch.no_grad():
        for critics, networks in ((agent.critics, model.critic), (agent.slow_critics, model.critic_target)):
            for number, network in enumerate(networks.q_networks):
                linear = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
                for layer, weight, bias in zip(linear, critics.weights, critics.biases, strict=True):
                    layer.weight.copy_(weight[number].T)
                    layer.bias.copy_(bias[number, 0])


def check_same(training: Any, model: Any) -> float:
    """The most difference between both sides' values of our transitions. Raises RuntimeError if it is above APART."""
    copy_weights(training.agent, model)
    data = training.replay.everything()
    with torch.no_grad():
        mine = training.agent.critics(torch.cat([data.observation, data.action], -1))[..., 0]
        other = torch.stack(model.critic(data.observation, data.action))[..., 0]
    apart = float((mine - other).abs().max())
    sizes = [sum(one.numel() for one in part.parameters()) for part in (training.agent.critics, model.critic)]
    if apart > APART or sizes[0] != sizes[1]:
        raise RuntimeError(f"the critics differ: {sizes[0]} and {sizes[1]} weights, values {apart:g} apart")
    return apart


def sides(options: Options, kind: str) -> tuple[Side, Side, float]:
    """Ours and theirs, and how far apart their values are. kind: updates or steps."""
    count = options.size(2000, 20)
    training, model = ours(options), theirs(options)
    apart = check_same(training, model)
    model._logger = model.logger  # `learn` sets it, and `train` writes to it

    def our_run() -> float:
        before = training.agent.updates
        if kind == "updates":
            training.learn(count)
        else:
            play(training, count)
        return float(training.agent.updates - before)

    def their_run() -> float:
        before = model._n_updates
        if kind == "updates":
            model.train(gradient_steps=count, batch_size=BATCH)
        else:
            model.learn(count, reset_num_timesteps=False)
        return float(model._n_updates - before)

    return Side("ours", our_run), Side("Stable-Baselines3", their_run), apart


def measure(options: Options) -> dict[str, Result]:
    torch.set_num_threads(options.threads)
    np.random.seed(0)
    found = {}
    for kind in ("updates", "steps"):
        mine, other, apart = sides(options, kind)
        notes = {"batch": BATCH, "width": WIDTH, "task": TASK, "largest difference of values": apart}
        found[f"off_policy_{kind}"] = Result("updates/s", AGAINST, "rate", *alternate(mine, other, options), notes=notes)
    return found
