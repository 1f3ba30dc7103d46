"""Learning from a world model's rollouts beside real transitions: model-based policy optimisation (MBPO, arXiv 1906.08253)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.model_fit import fit
from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.terminations import ends_of
from stages.control.off_policy.updates import FlatAdam
from stages.control.off_policy.world_model import WorldModel
from stages.runtime.validation import ParamsError
from stages.values.vagram import weights_of


class Imagination:
    """The model, its fits, and the transitions that it makes up."""

    def __init__(self, settings: OffPolicy, observations: int, actions: int) -> None:
        assert settings.dynamics is not None
        self.run, self.settings, self.ends = settings, settings.dynamics, ends_of(settings.task)
        self.model = WorldModel(self.settings, observations, actions)
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        bounds = [self.model.highest, self.model.lowest]  # apart, since only a probabilistic model's get gradients
        self.optimiser = FlatAdam(self.model.network.parameters(), bounds, learning_rate=rate, weight_decay=decay)
        longest = max(self.settings.horizon.first, self.settings.horizon.last)
        capacity = self.settings.rollouts * longest * self.settings.kept_fits
        self.replay = Replay(capacity, observations, actions)
        self.fits, self.fitted_at = 0, -self.settings.fit_every

    def prepare(self, real: Replay, agent: Agent, step: int, generator: torch.Generator) -> None:
        """Fit the model and roll it out, if `fit_every` steps have passed since the last time. Raises ParamsError as `fit_model`
        does."""
        if step - self.fitted_at < self.settings.fit_every:
            return
        self.fit_model(real, agent, generator)
        self.fitted_at = step
        self.roll_out(real, agent, step, generator)

    def fit_model(self, real: Replay, agent: Agent, generator: torch.Generator) -> None:
        """Raises ParamsError if a real episode ended before its time was up and nothing says where rollouts do."""
        data = real.everything()
        if self.ends is None and data.terminated.any():
            raise ParamsError(
                f"dynamics: an episode of {self.run.task} ended before its time limit, and the model's rollouts have no ends; "
                f"remove dynamics, use a task without termination, such as Pendulum-v1, or add a rule to "
                f"stages/control/off_policy/terminations.py"
            )
        self.model.measure(data)
        fit(self.model, self.optimiser, data, self.weights(agent, data), self.plain, generator)
        self.fits += 1

    @property
    def plain(self) -> bool:
        """Whether the next fit adds the plain squared error."""
        warm_up = self.settings.value_aware.warm_up
        return warm_up == "always" or (warm_up == "first_fit" and self.fits == 0)

    def weights(self, agent: Agent, data: Transitions) -> Tensor | None:
        """Of the errors, [K, B, S]; None for losses without."""
        if self.settings.loss not in ("vaml", "vagram"):
            return None
        aware = self.settings.value_aware
        gradients = agent.value_gradients(data.following, aware.heads)
        if aware.mask_ends:
            gradients = gradients * (1.0 - data.terminated)[:, None]
        found = weights_of(gradients, self.model.output_std[:-1], aware)
        return found.abs().clamp(min=aware.floor) if aware.floor else found

    def roll_out(self, real: Replay, agent: Agent, step: int, generator: torch.Generator) -> None:
        """Add rollouts to what is learnt from."""
        for transitions in self.rollouts(real, agent, step, generator):
            self.replay.add(transitions)

    @torch.no_grad()
    def rollouts(self, real: Replay, agent: Agent, step: int, generator: torch.Generator) -> Iterator[Transitions]:
        """The first, second, ... steps of rollouts from real states. Where the task ends a rollout stops, and its last transition
        is terminal; where only the rollout ends, it is not."""
        state = real.draw(self.settings.rollouts, generator).observation
        for _ in range(self.settings.horizon.at(step)):
            action = agent.policy.sample(state, generator)[0]
            following, reward = self.model.step(state, action, generator)
            over = torch.zeros_like(reward) if self.ends is None else self.ends(following).float()
            yield Transitions(state, action, reward, following, over)
            state = following if self.ends is None else following[over == 0.0]
            if not len(state):
                return

    def real_share(self, step: int) -> float:
        """Of real transitions in what the agent learns from."""
        final, ramp = self.settings.real_share, self.settings.ramp
        left = max(0.0, 1.0 - (step - self.run.warm_up) / ramp) if ramp else 0.0
        return final + (1.0 - final) * left

    def draw(self, real: Replay, step: int, generator: torch.Generator) -> Transitions:
        """A batch of real and made-up transitions; the number of real ones is rounded down, as in the reference code."""
        count, share = self.run.batch, self.real_share(step)
        if self.settings.mixture == "whole":
            imagined = float(torch.rand((), generator=generator)) < 1.0 - share
            return (self.replay if imagined else real).draw(count, generator)
        recorded = int(share * count)
        counts = ((real, recorded), (self.replay, count - recorded))
        return Transitions.joined([replay.draw(number, generator) for replay, number in counts if number])

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "replay": self.replay.state(),
            "fits": self.fits,
            "fitted_at": self.fitted_at,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.replay.restore(state["replay"])
        self.fits, self.fitted_at = state["fits"], state["fitted_at"]
