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
from stages.control.off_policy.model_evaluation import model_figures, new_transitions
from stages.control.off_policy.model_fit import fit
from stages.control.off_policy.model_settings import Dynamics, Horizon
from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.training import Training, run
from stages.control.off_policy.updates import FlatAdam
from stages.control.off_policy.vector_task import VectorTask
from stages.control.off_policy.world_model import WorldModel
from stages.runtime.validation import ParamsError
from stages.seeding import key64

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


@pytest.mark.parametrize(("share", "batch", "real"), [(0.05, 256, 12), (0.05, 128, 6), (0.1, 10, 1), (0.0, 8, 0), (0.25, 8, 2)])
def test_the_number_of_real_transitions_is_rounded_down(share: float, batch: int, real: int) -> None:
    """Of 256 with a share of 0.05, the reference code's int(0.05 * 256) = 12."""
    imagination, agent, replay = made({"real_share": share}, batch=batch)
    imagination.prepare(replay, agent, 10, generator())
    imagination.replay.kept.terminated.fill_(1.0)  # to tell them apart
    drawn = imagination.draw(replay, 20, generator())
    assert len(drawn.terminated) == batch
    assert (drawn.terminated == 0).sum() == real


def test_with_real_transitions_alone_no_model_is_rolled_out() -> None:
    """A share of 1 is the run without a model, to the bit."""
    found, expected = (
        run(OffPolicy.model_validate({**SMALL, **values})) for values in ({"dynamics": {**MODEL, "real_share": 1.0}}, {})
    )
    assert found == expected
    assert Training(OffPolicy.model_validate({**SMALL, "dynamics": {"real_share": 1.0}})).imagination is None


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


@pytest.mark.parametrize("values", [{"output_noise": 3.0}, {"kind": "probabilistic", "loss": "nll"}])
def test_the_models_error_is_that_of_its_means(values: dict[str, Any]) -> None:
    """Contract: noise of predictions is no error of the model. With weights of 0 it predicts that states stay: its error is the
    mean square of their changes, in units of 1, which `measure` has not changed."""
    imagination, agent, _ = made(values, task="Pendulum-v1", evaluate_episodes=2)
    settings = imagination.run
    imagination, agent = Imagination(settings, 3, 1), Agent(settings, 3, 1)
    with torch.no_grad():
        for parameter in imagination.model.network.parameters():
            parameter.zero_()
    found = model_figures(agent, imagination, settings)
    draws = generator(key64(settings.seed, "off_policy", "model figures") % 2**63)
    data = new_transitions(agent, settings, draws)
    changes = data.following - data.observation
    assert found["model_error"] == pytest.approx(changes.square().mean().item(), rel=1e-5)
    assert found["model_distance"] > changes.norm(dim=1).mean()
    gradients = agent.value_gradients(data.following, "all")
    assert found["value_error"] == pytest.approx((gradients * changes).square().mean().item(), rel=1e-5)


def test_the_spread_of_a_gaussian_model_begins_within_bounds() -> None:
    """Log variances of -10 to 0.5."""
    torch.manual_seed(0)
    model = WorldModel(Dynamics(kind="probabilistic", loss="nll", width=8), 2, 1)
    found = []
    for raw in (-100.0, 100.0):
        with torch.no_grad():
            model.network.biases[-1][..., 3:].fill_(raw)
            log_std = model(torch.zeros(1, 2), torch.zeros(1, 1))[1]
        assert log_std is not None
        found.append((2.0 * log_std).flatten().tolist())
    assert found == [pytest.approx([-10.0] * 3, abs=0.02), pytest.approx([0.5] * 3, abs=0.02)]


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
