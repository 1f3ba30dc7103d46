"""Switches of learnt dynamics, by hand: MOPO's penalty, where rollouts end, masked and least weights, better fits."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.imagination import Imagination
from stages.control.off_policy.model_fit import _to_beat
from stages.control.off_policy.model_settings import Dynamics
from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.terminations import ends_of
from stages.control.off_policy.world_model import WorldModel

GAUSSIAN = {"kind": "probabilistic", "loss": "nll", "width": 8}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_penalty_is_the_longest_spread_of_any_member() -> None:
    """Standard deviations of (0.3, 0.4) in two members, one twice as wide: lengths 0.5 and 1; the units double the reward's. The
    reward is 0 less 2 * 1."""
    settings = Dynamics.model_validate({**GAUSSIAN, "members": 2, "penalty": "mopo", "penalty_weight": 2.0})
    model = WorldModel(settings, 1, 1)
    with torch.no_grad():
        model.network.weights[-1].zero_()
        model.network.biases[-1].zero_()
        spread = torch.tensor([[0.3, 0.2], [0.6, 0.4]]).log()
        model.highest.fill_(50.0)  # so wide that they bound nothing
        model.lowest.fill_(-50.0)
        model.network.biases[-1][:, 0, 2:] = spread
        model.output_std.copy_(torch.tensor([1.0, 2.0]))
    state = torch.zeros(4, 1)
    assert model.uncertainty(state, state).tolist() == pytest.approx([1.0] * 4)
    drawn = model.predictions(state, state, generator())[1][0]
    reward = model.step(state, state, generator())[1]
    assert (reward - drawn).tolist() == pytest.approx([-2.0] * 4)


def test_a_weight_of_zero_changes_no_reward() -> None:
    found = []
    for values in ({}, {"penalty": "mopo", "penalty_weight": 0.0}):
        torch.manual_seed(0)
        model = WorldModel(Dynamics.model_validate({**GAUSSIAN, **values}), 1, 1)
        found.append(model.step(torch.ones(3, 1), torch.ones(3, 1), generator()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("task", "state", "over"),
    [
        ("Hopper-v5", [0.71, 0.19, 99.0], False),
        ("Hopper-v5", [0.70, 0.0, 0.0], True),
        ("Hopper-v5", [1.2, -0.2, 0.0], True),
        ("Hopper-v5", [1.2, 0.0, -100.0], True),
        ("Hopper-v5", [1.2, 0.0, float("nan")], True),
        ("Hopper-v4", [float("inf"), 0.0, 0.0], True),
        ("Walker2d-v5", [0.81, 0.99, 500.0], False),
        ("Walker2d-v5", [2.0, 0.0, 0.0], True),
        ("Walker2d-v5", [0.8, 0.0, 0.0], True),
        ("Walker2d-v5", [1.0, -1.0, 0.0], True),
        ("HalfCheetah-v5", [-9.0, 9.0, 1e9], False),
    ],
)
def test_where_episodes_end(task: str, state: list[float], over: bool) -> None:
    rule = ends_of(task)
    assert rule is not None
    assert rule(torch.tensor([state])).tolist() == [over]
    assert ends_of("Pendulum-v1") is None


@pytest.mark.parametrize("task", ["Hopper-v5", "Walker2d-v5"])
def test_the_rules_are_gymnasiums(task: str) -> None:
    pytest.importorskip("mujoco")
    environment, rule = gymnasium.make(task), ends_of(task)
    environment.reset(seed=0)
    environment.action_space.seed(0)
    seen = []
    for _ in range(300):
        observation, _, terminated, *_ = environment.step(environment.action_space.sample())
        assert rule is not None
        assert rule(torch.from_numpy(observation.astype(np.float32))[None]).item() == terminated
        seen.append(terminated)
        if terminated:
            environment.reset()
    assert any(seen)


def made(task: str, observations: int, **dynamics: Any) -> tuple[Imagination, Agent, Replay]:
    values = {"width": 8, "fit_every": 5, "rollouts": 12, "epochs": 1, **dynamics}
    settings = OffPolicy.model_validate({"task": task, "width": 8, "batch": 8, "dynamics": values})
    torch.manual_seed(0)
    return Imagination(settings, observations, 1), Agent(settings, observations, 1), Replay(40, observations, 1)


def test_rollouts_stop_where_the_task_ends() -> None:
    """The model takes 0.4 of height per step: of three steps from a height of 1.6, the second leads to 0.8, the third to 0.4,
    which is terminal, and no fourth follows."""
    imagination, agent, replay = made("Hopper-v5", 3, horizon={"first": 5, "last": 5})
    state = torch.tensor([[1.6, 0.0, 0.0]]).repeat(10, 1)
    replay.add(Transitions(state, torch.zeros(10, 1), torch.zeros(10), state, torch.ones(10)))

    def step(state: torch.Tensor, action: torch.Tensor, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return state - torch.tensor([0.4, 0.0, 0.0]), torch.zeros(len(state))

    imagination.model.step = step  # type: ignore[method-assign]
    imagination.roll_out(replay, agent, 0, generator())
    found = imagination.replay.everything()
    assert len(found.reward) == 36
    assert found.terminated.reshape(3, 12).mean(1).tolist() == [0.0, 0.0, 1.0]
    assert found.following[24:, 0].tolist() == pytest.approx([0.4] * 12)


def test_ends_of_a_known_task_are_learnt_from() -> None:
    """As in test_dynamics, which has them refused for other tasks."""
    imagination, agent, replay = made("Hopper-v5", 3)
    state = torch.rand(30, 3, generator=generator())
    replay.add(Transitions(state, torch.zeros(30, 1), torch.zeros(30), state, torch.ones(30)))
    imagination.prepare(replay, agent, 0, generator())
    assert imagination.fits == 1


def test_ends_have_no_value() -> None:
    """Weights of the terminal transitions are 0, unless the reference code's way is asked for; floors raise what is small."""
    found = {}
    for name, values in {"masked": {}, "kept": {"mask_ends": False}, "floor": {"floor": 0.5}}.items():
        aware = {"clip_quantile": None, **values}
        imagination, agent, _ = made("Hopper-v5", 3, loss="vagram", value_aware=aware)
        state = torch.rand(6, 3, generator=generator())
        terminated = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        weights = imagination.weights(agent, Transitions(state, torch.zeros(6, 1), torch.zeros(6), state, terminated))
        assert weights is not None
        found[name] = weights
    assert not found["masked"][:, 0].any()
    assert found["kept"][:, 0].any()
    assert torch.equal(found["masked"][:, 1:], found["kept"][:, 1:])
    assert torch.equal(found["floor"], found["masked"].abs().clamp(min=0.5))
    assert (found["floor"][:, 0] == 0.5).all()


@pytest.mark.parametrize(("share", "expected"), [(0.0, [2.0, -1.0]), (0.01, [1.98, -1.01])])
def test_what_a_loss_must_be_below(share: float, expected: list[float]) -> None:
    """1 % below a best loss of 2 and of -1; anything is below the first."""
    found = _to_beat(torch.tensor([2.0, -1.0, torch.inf]), share)
    assert found[:2].tolist() == pytest.approx(expected)
    assert found[2] == torch.inf


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"penalty": "mopo"}, "penalty mopo needs kind: probabilistic; a deterministic model has no spread"),
        ({"penalty": "morel"}, "Input should be 'none' or 'mopo'"),
        ({**GAUSSIAN, "penalty_weight": 3.0}, "penalty_weight has no effect: it needs penalty: mopo"),
        ({"loss": "vaml", "value_aware": {"floor": 0.1}}, "floor has no effect with loss: vaml"),
        ({"value_aware": {"mask_ends": False}}, "value_aware has no effect with loss: mse"),
        ({"least_improvement": 1.0}, "less than 1"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OffPolicy.model_validate({"dynamics": values})
