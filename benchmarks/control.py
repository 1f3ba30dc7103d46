"""deep_q_updates and on_policy_updates: DQN and PPO on CartPole-v1, against Stable-Baselines3 with the same networks, batch size
and learning rate; on_policy_steps: the whole loop of playing and updating.

Before anything is measured, both sides get the same weights, and their values of the same observations are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Options, Result, Side, alternate
from benchmarks.startup import SkippedError

TASK = "CartPole-v1"
DEEP_Q = {"task": TASK, "steps": 1_000_000, "evaluate_every": 1_000_000, "width": 64, "batch": 32, "learning_rate": 1e-4}
ON_POLICY = {"task": TASK, "environments": 8, "horizon": 32, "batch": 256, "epochs": 20, "width": 64, "learning_rate": 1e-3}
FILLED = 2000
"""Transitions in the replay buffers before DQN's updates are measured."""
APART = 1e-4
"""Most difference between both sides' values, with the same weights."""


def library() -> Any:
    try:
        import stable_baselines3
    except ModuleNotFoundError as error:
        raise SkippedError("Stable-Baselines3 is not installed; pip install 'bellwether[control]'") from error
    return stable_baselines3


def linear(layers: Any) -> list[Any]:
    return [layer for layer in layers if isinstance(layer, torch.nn.Linear)]


def copy(layers: list[Any], ensemble: Any, member: int = 0) -> None:
    """Give their linear layers the weights of an ensemble's member."""
    with torch.no_grad():
        for layer, weight, bias in zip(layers, ensemble.weights, ensemble.biases, strict=True):
            layer.weight.copy_(weight[member].T)
            layer.bias.copy_(bias[member, 0])


def checked(mine: torch.Tensor, other: torch.Tensor) -> float:
    """The most difference. Raises RuntimeError if it is above APART."""
    apart = float((mine - other).abs().max())
    if apart > APART:
        raise RuntimeError(f"both sides' values are {apart:g} apart with the same weights")
    return apart


def deep_q(options: Options) -> tuple[Side, Side, float]:
    from stages.control.off_policy.dqn_settings import DeepQ
    from stages.control.off_policy.training import Training

    count = options.size(1000, 20)
    training = Training(DeepQ.model_validate({**DEEP_Q, "warm_up": FILLED}))
    observation = training.task.reset(0)
    for _ in range(FILLED):
        observation = training.step(observation)
    model = library().DQN(
        "MlpPolicy",
        TASK,
        learning_rate=DEEP_Q["learning_rate"],
        batch_size=DEEP_Q["batch"],
        learning_starts=FILLED,
        policy_kwargs={"net_arch": [DEEP_Q["width"]] * 2},
        seed=0,
        device="cpu",
    )
    model.learn(FILLED)
    copy(linear(model.q_net.q_net), training.agent.network)
    seen = training.replay.everything().observation
    with torch.no_grad():
        apart = checked(training.agent.values(seen), model.q_net(seen))
    ours = counted(lambda: training.learn(count), lambda: training.agent.updates)
    theirs = counted(lambda: model.train(gradient_steps=count, batch_size=DEEP_Q["batch"]), lambda: model._n_updates)
    return Side("ours", ours), Side("Stable-Baselines3", theirs), apart


def on_policy(options: Options, kind: str) -> tuple[Side, Side, float]:
    """kind: updates, of the steps of one iteration; or steps, played and learnt from."""
    from stable_baselines3.common.env_util import make_vec_env

    from stages.control.on_policy.settings import Ppo
    from stages.control.on_policy.training import Training

    iterations = options.size(20, 1)
    training = Training(Ppo.model_validate(ON_POLICY))
    model = library().PPO(
        "MlpPolicy",
        make_vec_env(TASK, ON_POLICY["environments"], seed=0),
        n_steps=ON_POLICY["horizon"],
        batch_size=ON_POLICY["batch"],
        n_epochs=ON_POLICY["epochs"],
        learning_rate=ON_POLICY["learning_rate"],
        policy_kwargs={"net_arch": [ON_POLICY["width"]] * 2},
        seed=0,
        device="cpu",
    )
    played = ON_POLICY["environments"] * ON_POLICY["horizon"]
    model.learn(played)
    extractor = model.policy.mlp_extractor
    for member, network in enumerate((extractor.policy_net, extractor.value_net)):
        copy(linear(network), training.agent.trunk, member)
    for head, other in ((training.agent.policy, model.policy.action_net), (training.agent.value, model.policy.value_net)):
        other.load_state_dict(head.state_dict())
    batch, training.observation = training.collect(training.task.reset(0))
    with torch.no_grad():
        apart = checked(training.agent(batch.observation)[1], model.policy.predict_values(batch.observation)[:, 0])

    def our_updates() -> None:
        for _ in range(iterations):
            training.learn(batch)

    def their_updates() -> None:
        for _ in range(iterations):
            model.train()

    def our_steps() -> None:
        for _ in range(iterations):
            found, training.observation = training.collect(training.observation)
            training.learn(found)

    if kind == "updates":
        ours = counted(our_updates, lambda: training.agent.updates)
        # theirs counts epochs, each of which is one batch here
        return Side("ours", ours), Side("Stable-Baselines3", counted(their_updates, lambda: model._n_updates)), apart
    theirs = counted(lambda: model.learn(iterations * played, reset_num_timesteps=False), lambda: model.num_timesteps)
    return Side("ours", counted(our_steps, lambda: training.steps)), Side("Stable-Baselines3", theirs), apart


def counted(work: Callable[[], Any], count: Callable[[], int]) -> Callable[[], float]:
    """Does the work; how much the count grew."""

    def run() -> float:
        before = count()
        work()
        return float(count() - before)

    return run


def measure(options: Options) -> dict[str, Result]:
    torch.set_num_threads(options.threads)
    library()
    found = {}
    scenarios = (
        ("deep_q_updates", "updates/s", "Stable-Baselines3 DQN", deep_q(options), DEEP_Q),
        ("on_policy_updates", "updates/s", "Stable-Baselines3 PPO", on_policy(options, "updates"), ON_POLICY),
        ("on_policy_steps", "steps/s", "Stable-Baselines3 PPO", on_policy(options, "steps"), ON_POLICY),
    )
    for name, unit, against, (mine, other, apart), settings in scenarios:
        notes = {"task": TASK, "batch": settings["batch"], "width": settings["width"], "largest difference of values": apart}
        found[name] = Result(unit, against, "rate", *alternate(mine, other, options), notes=notes)
    return found
