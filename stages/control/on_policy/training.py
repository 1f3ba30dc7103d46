"""The on-policy loop: play, estimate advantages, update, evaluate.

`python -m stages.control.on_policy.training --settings FILE --result FILE` trains once: a run of lane control with
`environment: on_policy`. Steps, draws and updates follow from the settings alone, with one thread to the bit.
"""

from __future__ import annotations

from typing import Any

import torch

from stages.control.learnt import Learnt
from stages.control.off_policy.evaluation import mean_return
from stages.control.off_policy.vector_task import Floats, VectorTask
from stages.control.on_policy.ppo import ActorCritic, Steps, advantages
from stages.control.on_policy.settings import Ppo
from stages.control.one_run import one_run
from stages.control.rounds import Rounds
from stages.runtime.command import command
from stages.seeding import key64, seed_torch


class Training(Rounds):
    """One agent's run; see `Ppo`."""

    def __init__(self, settings: Ppo) -> None:
        """Raises ParamsError, ModuleNotFoundError as VectorTask does."""
        super().__init__()
        seed_torch(settings.seed, "on_policy")
        self.settings = settings
        self.task = VectorTask(settings.task, settings.environments, allowed="either")
        self.evaluated = VectorTask(settings.task, settings.evaluate_episodes, allowed="either")
        self.agent = ActorCritic(settings, self.task.observations, self.task.actions, self.task.discrete)
        self.generator = torch.Generator().manual_seed(key64(settings.seed, "on_policy", "draws") % 2**63)
        self.steps = 0

    @property
    def done(self) -> bool:
        return self.steps >= self.settings.steps

    def round(self) -> None:
        """`evaluate_every` steps in new episodes, and an evaluation. A run can be saved between rounds."""
        observation = self.task.reset(self._first("episodes"))
        for _ in range(self.settings.evaluate_every // (self.settings.environments * self.settings.horizon)):
            batch, observation = self.collect(observation)
            self.learn(batch)
        self.returns.append(mean_return(self.agent.greedy, self.evaluated, self._first("evaluation")))

    def _first(self, purpose: str) -> int:
        """A seed of Gymnasium's."""
        return key64(self.settings.seed, "on_policy", purpose, self.steps) % 2**31

    def collect(self, observation: Floats) -> tuple[Steps, Floats]:
        """`horizon` steps of each environment, with advantages, and the next observations."""
        columns: list[tuple[torch.Tensor, ...]] = []
        for _ in range(self.settings.horizon):
            seen = torch.from_numpy(observation)
            action, log_density, value = self.agent.act(seen, self.generator)
            outcome = self.task.step(action.numpy())
            found = (outcome.reward, outcome.following, outcome.terminated.astype("f4"), outcome.ended.astype("f4"))
            columns.append((seen, action, log_density, value, *map(torch.from_numpy, found)))
            observation = outcome.observation
        self.steps += self.settings.horizon * len(observation)
        seen, action, log_density, value, reward, following, terminated, ended = (
            torch.stack(column) for column in zip(*columns, strict=True)
        )
        with torch.no_grad():
            after = self.agent(following.flatten(0, 1))[1].unflatten(0, value.shape) * (1.0 - terminated)
        gained = advantages(reward, value, after, ended, self.settings.gamma, self.settings.lam)
        parts = (seen, action, log_density, gained, gained + value)
        return Steps(*(part.flatten(0, 1) for part in parts)), observation

    def learn(self, steps: Steps) -> None:
        """`epochs` passes over the steps in random batches."""
        for _ in range(self.settings.epochs):
            for batch in steps.shuffled(self.settings.batch, self.generator):
                self.agent.update(batch)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.steps = state["steps"]


def learn(settings: Ppo) -> Learnt:
    """Train once; see `Rounds.learnt`."""
    training = Training(settings)
    training.train()
    return training.learnt(updates=float(training.agent.updates))


def run(settings: Ppo) -> dict[str, float]:
    """The figures of `learn`."""
    return learn(settings).figures


@command
def main() -> int:
    return one_run("control", __doc__, Ppo, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
