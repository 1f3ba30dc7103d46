"""Around an obstacle, from demonstrations that go left or right of it: the mean of both ways leads into it.

`python -m stages.control.soft_q.detour --settings FILE --result FILE` learns once: a run of lane control with
`environment: detour`. Half of the demonstrations are careless. The task is `bellwether/Detour-v0` (stages/control/tasks.py); the
loops are those of off-policy and of offline learning.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from stages.control.learnt import Act, Learnt
from stages.control.off_policy.replay import Demonstrations
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.training import Training
from stages.control.off_policy.vector_task import VectorTask
from stages.control.offline import training as offline
from stages.control.offline.datasets import DataSet, PlayedEpisode
from stages.control.offline.settings import Offline
from stages.control.one_run import one_run
from stages.control.soft_q.agent import SoftQAgent
from stages.control.soft_q.settings import ARSQ_ONLY, DetourTask, SoftQLearning
from stages.runtime.command import command
from stages.seeding import key64

SHARED = ("seed", "steps", "evaluate_every", "evaluate_episodes", "batch", "width", "layers", "learning_rate", "checkpoint")
CORNER = 0.6
"""A way around goes on in its first direction until that coordinate has this value."""
PLAYED = 100
"""Episodes in the last evaluation."""


def way(position: np.ndarray, first: int) -> np.ndarray:
    """The action [2] at a position [2] on the way that begins with coordinate `first` (0: x) alone."""
    action = np.zeros(2)
    action[first if position[first] < CORNER else 1 - first] = 1.0
    return action


def recorded(settings: DetourTask) -> DataSet:
    """The demonstrations: ways around, alternately on both sides, and careless episodes, alternately random and straight."""
    rng = np.random.default_rng(key64(settings.seed, "detour", "demonstrations"))
    task, careless = VectorTask(settings.task, 1), round(settings.careless * settings.episodes)
    episodes = []
    for number in range(settings.episodes):
        observation, over, terminated = task.reset(key64(settings.seed, "detour", "episode", number) % 2**31), False, False
        seen, actions, rewards = [observation[0]], [], []
        while not over:
            action = _drawn(seen[-1], number, number < careless, settings.noise, rng)
            outcome = task.step(action[None].astype(np.float32))
            seen.append(outcome.following[0])
            actions.append(action.clip(-1.0, 1.0))
            rewards.append(float(outcome.reward[0]))
            over, terminated = bool(outcome.ended[0]), bool(outcome.terminated[0])
        episodes.append(PlayedEpisode(np.array(seen, "f4"), np.array(actions, "f4"), np.array(rewards), terminated))
    return DataSet("detour", settings.task, episodes)


def _drawn(position: np.ndarray, number: int, careless: bool, noise: float, rng: np.random.Generator) -> np.ndarray:
    noisy = noise * rng.standard_normal(2)
    if not careless:
        return way(position, number % 2) + noisy
    return rng.uniform(-1.0, 1.0, 2) if number % 2 else np.ones(2) + noisy


def trained(settings: DetourTask) -> Any:
    """The finished run: a Training of one of both loops."""
    shared = {name: getattr(settings, name) for name in SHARED}
    if settings.learner == "bc":
        updates = shared.pop("steps")
        training = offline.Training(Offline(**shared, updates=updates, method="bc", task=settings.task), recorded(settings))
        training.train()
        return training
    loop = {**shared, "task": settings.task, "gamma": settings.gamma, "target_rate": settings.target_rate, "warm_up": 1}
    demonstrations = None
    if settings.use_demonstrations:
        probe = VectorTask(settings.task, 1)
        demonstrations = Demonstrations(offline.transitions(recorded(settings), probe, 1.0), settings.demonstration_share)
    if settings.learner == "sac":
        chosen = OffPolicy(**loop, alpha=settings.alpha, updates_per_step=settings.updates_per_step)
        online = Training(chosen, demonstrations=demonstrations)
    else:
        own = {name: getattr(settings, name) for name in (*ARSQ_ONLY, "alpha", "updates_per_step", "act_network")}
        rows = 0 if demonstrations is None else demonstrations.rows(settings.batch)
        make = lambda chosen, seen, actions: SoftQAgent(chosen, seen, actions, rows)  # noqa: E731
        online = Training(SoftQLearning(**loop, **own), make, demonstrations)
    online.train()
    return online


def ends(act: Act, settings: DetourTask) -> tuple[float, float]:
    """Shares of PLAYED new episodes that end at the goal, and at the obstacle."""
    task = VectorTask(settings.task, PLAYED)
    observation, going = task.reset(key64(settings.seed, "detour", "ends") % 2**31), np.ones(PLAYED, dtype=bool)
    reached = hit = 0
    while going.any():
        outcome = task.step(act(torch.from_numpy(observation)).numpy())
        reached += int((going & outcome.terminated & (outcome.reward > 0)).sum())
        hit += int((going & outcome.terminated & (outcome.reward < 0)).sum())
        going &= ~outcome.ended
        observation = outcome.observation
    return reached / PLAYED, hit / PLAYED


def learn(settings: DetourTask) -> Learnt:
    """Learn once. success, hits: `ends` of the greedy policy; return_end: of the last evaluation; return_mean: over all
    evaluations, the area under the learning curve; least_advantage, of ARSQ: over the steps in the replay buffer, far below 0
    where values of bins run away that nothing holds."""
    training = trained(settings)
    if settings.checkpoint:
        Path(settings.checkpoint).unlink()
    success, hits = ends(training.agent.greedy, settings)
    figures = {"success": success, "hits": hits, "return_end": training.returns[-1], "return_mean": fmean(training.returns)}
    if settings.learner == "arsq":
        figures["least_advantage"] = training.agent.least_advantage(training.replay.everything())
    steps = [settings.evaluate_every * (number + 1) for number in range(len(training.returns))]
    return Learnt(figures, steps, training.returns, training.agent.greedy)


def run(settings: DetourTask) -> dict[str, float]:
    """The figures of `learn`."""
    return learn(settings).figures


@command
def main() -> int:
    return one_run("control", __doc__, DetourTask, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
