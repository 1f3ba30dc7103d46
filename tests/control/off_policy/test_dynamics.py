"""Learnt dynamics: the model learns, rollouts and batches are what the settings say, runs resume exactly, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.imagination import Imagination
from stages.control.off_policy.model_fit import fit
from stages.control.off_policy.model_settings import Dynamics, Horizon
from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.training import Training, run
from stages.control.off_policy.updates import FlatAdam
from stages.control.off_policy.vector_task import VectorTask
from stages.control.off_policy.world_model import WorldModel
from stages.runtime.validation import ParamsError

SMALL = {"steps": 60, "evaluate_every": 20, "warm_up": 10, "batch": 8, "width": 8, "evaluate_episodes": 1, "gamma": 0.9}
MODEL = {"width": 8, "fit_every": 15, "rollouts": 12, "epochs": 2}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def line(count: int) -> Transitions:
    """s' = s + a, r = 2 s."""
    state, action = torch.rand(2, count, 1, generator=generator(1)) * 2 - 1
    return Transitions(state, action, 2.0 * state[:, 0], state + action, torch.zeros(count))


@pytest.mark.parametrize("values", [{}, {"kind": "probabilistic", "loss": "nll"}])
def test_a_model_of_a_line(values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    settings = Dynamics.model_validate({**values, "members": 3, "elites": 2, "width": 32, "epochs": 100, "learning_rate": 1e-2})
    model, data = WorldModel(settings, 1, 1), line(400)
    optimiser = FlatAdam(model.parameters(), learning_rate=settings.learning_rate)
    model.measure(data)
    best = fit(model, optimiser, data, None, False, generator())
    assert model.elites.tolist() == sorted(best.argsort()[:2].tolist())
    following, reward = model.predictions(data.observation, data.action, generator())
    assert following.shape == (2, 400, 1)
    assert (following - data.following).square().mean().sqrt() < 0.1
    assert (reward - data.reward).square().mean().sqrt() < 0.2


def test_a_fit_keeps_the_best_weights() -> None:
    """With a learning rate that makes things worse, what was best after the first epoch is kept."""
    torch.manual_seed(0)
    model, data = WorldModel(Dynamics(width=8, epochs=6, patience=6), 1, 1), line(200)
    model.measure(data)
    optimiser = FlatAdam(model.parameters(), learning_rate=1.0)
    best = fit(model, optimiser, data, None, False, generator())
    order = torch.randperm(200, generator=generator())[:40]
    with torch.no_grad():
        found = model.loss(Transitions(*(value[order][None] for value in vars(data).values())), None, False)
    assert torch.allclose(found, best)


@pytest.mark.parametrize(("step", "expected"), [(0, 1), (10, 1), (15, 3), (20, 5), (99, 5)])
def test_the_horizon_grows(step: int, expected: int) -> None:
    assert Horizon(first=1, last=5, begin=10, end=20).at(step) == expected


def made(dynamics: dict[str, Any], **values: Any) -> tuple[Imagination, Agent, Replay]:
    settings = OffPolicy.model_validate({**SMALL, **values, "dynamics": {**MODEL, **dynamics}})
    replay = Replay(100, 1, 1)
    replay.add(line(50))
    return Imagination(settings, 1, 1), Agent(settings, 1, 1), replay


def test_rollouts_begin_at_real_states_and_follow_the_model() -> None:
    imagination, agent, replay = made({"horizon": {"first": 3, "last": 3}})
    imagination.prepare(replay, agent, 20, generator())
    found = imagination.replay.everything()
    assert len(found.reward) == 36
    assert torch.isin(found.observation[:12], replay.everything().observation).all()
    assert torch.equal(found.observation[12:], found.following[:-12])
    assert not found.terminated.any()
    again = imagination.model.predictions(found.observation, found.action, generator())
    assert torch.allclose(again[0][0], found.following, atol=1e-6)
    assert torch.allclose(again[1][0], found.reward, atol=1e-6)


def test_fits_are_fit_every_steps_apart() -> None:
    imagination, agent, replay = made({})
    fits = []
    for step in range(10, 50):
        imagination.prepare(replay, agent, step, generator(step))
        fits.append(imagination.fits)
    assert [fits.index(number) + 10 for number in (1, 2, 3)] == [10, 25, 40]


def test_the_models_share_of_batches() -> None:
    imagination, agent, replay = made({"real_share": 0.25, "ramp": 20})
    imagination.prepare(replay, agent, 10, generator())
    imagination.replay.kept.terminated.fill_(1.0)  # to tell them apart
    shares = [imagination.draw(replay, step, generator()).terminated.sum().item() / 8 for step in (10, 20, 30, 60)]
    assert shares == [0.0, 0.375, 0.75, 0.75]


def test_whole_batches_are_real_or_made_up() -> None:
    imagination, agent, replay = made({"real_share": 0.25, "mixture": "whole"})
    imagination.prepare(replay, agent, 10, generator())
    imagination.replay.kept.terminated.fill_(1.0)
    shares = [imagination.draw(replay, 20, generator(seed)).terminated.mean().item() for seed in range(200)]
    assert set(shares) == {0.0, 1.0}
    assert 0.65 < np.mean(shares) < 0.85


@pytest.mark.parametrize(
    "dynamics", [{}, {"loss": "vagram"}, {"kind": "probabilistic", "loss": "nll", "members": 3, "elites": 2}]
)
def test_a_saved_run_goes_on_to_the_bit(dynamics: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    settings = OffPolicy.model_validate({**SMALL, "dynamics": {**MODEL, **dynamics}, "distractors": 2})
    whole = Training(settings)
    whole.train()
    first = Training(settings)
    first.round()
    first.save(path)
    second = Training(settings.model_copy(update={"checkpoint": str(path)}))
    second.train()
    assert second.returns == whole.returns
    assert all(torch.equal(one, other) for one, other in zip(whole.agent.parameters(), second.agent.parameters(), strict=True))
    assert second.imagination is not None
    assert second.imagination.fits == 4


def test_figures_of_a_run_with_a_model() -> None:
    figures = run(OffPolicy.model_validate({**SMALL, "dynamics": MODEL, "lipschitz": {"kind": "spectral", "beta": 0.5}}))
    assert 0 < figures["lipschitz"] <= figures["lipschitz_most"]
    assert figures["lipschitz_bound"] <= 0.5**3 * 1.05
    for name in ("model_error", "value_error", "model_distance", "bellman_gap"):
        assert figures[name] > 0


class Ending(gymnasium.Env):
    """Ends after its first step."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(1, np.float32), 0.0, True, False, {}


gymnasium.register("Ending-v0", Ending, max_episode_steps=3)


def test_tasks_that_terminate_are_refused_with_a_model() -> None:
    settings = OffPolicy.model_validate({**SMALL, "task": "Ending-v0", "dynamics": MODEL})
    with pytest.raises(ParamsError, match="an episode of Ending-v0 ended before its time limit"):
        Training(settings).train()


def test_distractors_go_their_own_way() -> None:
    tasks = [VectorTask("Pendulum-v1", 2, distractors=4) for _ in range(2)]
    first = [task.reset(7) for task in tasks]
    assert tasks[0].observations == 7
    assert (first[0] == first[1]).all()
    assert (VectorTask("Pendulum-v1", 2).reset(7) == first[0][:, :3]).all()
    actions = np.full((2, 1), -1.0, np.float32), np.full((2, 1), 1.0, np.float32)
    after = [task.step(action).following for task, action in zip(tasks, actions, strict=True)]
    assert (after[0][:, 3:] == after[1][:, 3:]).all()
    assert (after[0][:, 2] != after[1][:, 2]).all()
    assert (after[0][:, 3:] != first[0][:, 3:]).all()
    assert np.allclose(after[0][:, 3:5] ** 2 + after[0][:, 5:] ** 2, 1.0, atol=1e-5)


def test_an_odd_number_of_distractors_is_refused() -> None:
    with pytest.raises(ValidationError, match="distractors 3 must be even"):
        OffPolicy(distractors=3)
