"""Makes a task's data sets: episodes of a random player, of a half-trained and of a trained agent, and the former's replay.

As in D4RL (Fu et al., arXiv 2004.07219); the half-trained agent is the first one that reaches a set return.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stages.control.off_policy.evaluation import first_episodes
from stages.control.off_policy.replay import Replay
from stages.control.off_policy.training import Training
from stages.control.off_policy.vector_task import VectorTask
from stages.control.offline.datasets import DataSet, PlayedEpisode, write_dataset
from stages.control.offline.settings import KINDS, DataSets
from stages.runtime.validation import ParamsError
from stages.seeding import key64

Draw = Callable[[Tensor, torch.Generator], Tensor]
"""Observations [N, S] and a source of random numbers -> actions [N, A] between -1 and 1."""


def play(task: VectorTask, draw: Draw, seed: int, generator: torch.Generator) -> list[PlayedEpisode]:
    """One episode of each of the task's environments."""
    observation = task.reset(seed)
    count = len(observation)
    going, seen = np.ones(count, dtype=bool), [[row] for row in observation]
    actions: list[list[np.ndarray]] = [[] for _ in range(count)]
    rewards: list[list[float]] = [[] for _ in range(count)]
    over = np.zeros(count, dtype=bool)
    while going.any():
        action = draw(torch.from_numpy(observation), generator).numpy()
        scaled, outcome = task.scaled(action), task.step(action)
        for place in np.flatnonzero(going):
            seen[place].append(outcome.following[place])
            actions[place].append(scaled[place])
            rewards[place].append(float(outcome.reward[place]))
        over |= going & outcome.terminated
        going &= ~outcome.ended
        observation = outcome.observation
    return [
        PlayedEpisode(np.array(seen[place], "f4"), np.array(actions[place], "f4"), np.array(rewards[place]), bool(over[place]))
        for place in range(count)
    ]


def episodes_of(replay: Replay, task: VectorTask, reward_scale: float) -> list[PlayedEpisode]:
    """The episodes in the buffer of a single environment: they end where the next observation is not the one that followed."""
    data = replay.everything()
    follows = (data.following[:-1] == data.observation[1:]).all(1) & (data.terminated[:-1] == 0)
    ends = [*(torch.nonzero(~follows)[:, 0] + 1).tolist(), len(data.reward)]
    found, first = [], 0
    for end in ends:
        rows = torch.arange(first, end)
        observations = torch.cat([data.observation[rows], data.following[rows[-1:]]]).numpy()
        actions = task.scaled(data.action[rows].numpy()).astype("f4")
        rewards = (data.reward[rows].double() / reward_scale).numpy()
        found.append(PlayedEpisode(observations, actions, rewards, bool(data.terminated[rows[-1]])))
        first = end
    return found


def make(folder: Path, name: str, settings: DataSets, scratch: Path) -> list[DataSet]:
    """Write the data sets `folder`/<name>/<kind>-v0 of every kind. `scratch`: where training is saved and goes on from."""
    agent = settings.off_policy
    training, half = train(settings, scratch)
    task = VectorTask(agent.task, settings.episodes)
    draws: dict[str, Draw] = {
        "random": lambda seen, generator: task.random(len(seen), generator),
        "medium": lambda seen, generator: half.agent.act(seen, 0, generator),
        "expert": lambda seen, generator: training.agent.act(seen, 0, generator),
    }
    made = []
    for kind in KINDS:
        if kind == "replay":
            episodes = episodes_of(half.replay, task, agent.reward_scale)
        else:
            generator = torch.Generator().manual_seed(key64(agent.seed, "datasets", kind) % 2**63)
            episodes = play(task, draws[kind], first_episodes(agent, "datasets", kind), generator)
        data = DataSet(f"{name}/{kind}-v0", agent.task, episodes)
        write_dataset(folder, data, f"{kind} of soft actor-critic")
        made.append(data)
    return made


def train(settings: DataSets, scratch: Path) -> tuple[Training, Training]:
    """The agent after all its steps, and when it first reached `medium_return`. Raises ParamsError if it never did."""
    training, saved = Training(settings.off_policy), {"medium": scratch / "medium.pt", "agent": scratch / "agent.pt"}
    scratch.mkdir(parents=True, exist_ok=True)
    if saved["agent"].exists():
        training.load(saved["agent"])
    while training.steps < settings.off_policy.steps:
        training.round()
        good = [number for number, found in enumerate(training.returns) if found >= settings.medium_return]
        if good[:1] == [len(training.returns) - 1]:
            training.save(saved["medium"])
        training.save(saved["agent"])
    if max(training.returns) < settings.medium_return:
        raise ParamsError(
            f"medium_return {settings.medium_return:g} was not reached in {training.steps} steps, but {max(training.returns):g}; "
            f"lower it, or raise agent.steps"
        )
    half = Training(settings.off_policy)
    half.load(saved["medium"])
    return training, half
