"""Lipschitz-regularised critics: norms and slopes by hand, the adversary's maximum, what they reduce to, refusals by name."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.model_settings import Dynamics
from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.world_model import WorldModel
from stages.values.ensemble import Ensemble
from stages.values.lipschitz import adversary, bounded, local_slopes, power_iteration, slope_penalty, value_gap
from stages.values.settings import Lipschitz

ROBUST = {"kind": "robust", "weight": 1.0}
SLOPES = torch.tensor([3.0, -4.0])


def linear(state: torch.Tensor) -> torch.Tensor:
    """Two critics with Q = 3 s_1 - 4 s_2, [2, B] of [1 or 2, B, 2]."""
    return (state @ SLOPES).expand(2, -1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(count: int = 16) -> Transitions:
    draw = generator(count)
    shapes = ((3,), (1,), (), (3,))
    return Transitions(*(torch.rand(count, *shape, generator=draw) for shape in shapes), torch.zeros(count))


def test_the_gap_of_a_deterministic_model_is_its_bound() -> None:
    """V = 2 s, true next state 1.0, predicted 1.3: gamma L W1 = 0.99 * 2 * 0.3."""
    gap = value_gap(lambda state: 2.0 * state[..., 0], torch.tensor([1.0]), torch.tensor([1.3]), 0.99)
    assert gap.item() == pytest.approx(0.594)


def test_layers_norms_are_bounded() -> None:
    weight = torch.diag(torch.tensor([3.0, 1.0]))[None]
    left, right = power_iteration(weight, torch.tensor([[0.6, 0.8]]), 20)
    assert (left @ weight[0] @ right.T).item() == pytest.approx(3.0, abs=1e-4)
    assert torch.allclose(bounded(weight, left, right, 1.0)[0], torch.diag(torch.tensor([1.0, 1 / 3])), atol=1e-4)
    assert torch.equal(bounded(weight, left, right, 5.0), weight)
    zero = torch.zeros(1, 2, 3)
    assert torch.equal(bounded(zero, *power_iteration(zero, torch.ones(1, 3), 5), 1.0), zero)


@pytest.mark.parametrize(("norm", "expected", "within"), [("linf", 0.49, 1e-4), ("l2", 0.25, 0.02)])
def test_the_adversary_finds_the_largest_change(norm: str, expected: float, within: float) -> None:
    """For slopes (3, -4) and a radius of 0.1: 0.7 in the maximum norm, 0.5 in the Euclidean one; squared."""
    settings = Lipschitz.model_validate({**ROBUST, "epsilon": 0.1, "norm": norm, "steps": 1 if norm == "linf" else 20})
    found = slope_penalty(linear, torch.zeros(5, 2), settings, torch.ones(2), generator())
    assert found.item() == pytest.approx(2 * expected, rel=within)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_changes_stay_in_the_ball_and_count_in_units_of_the_scale(norm: str) -> None:
    settings = Lipschitz.model_validate({**ROBUST, "epsilon": 0.1, "norm": norm, "steps": 3})
    scale = torch.tensor([10.0, 0.0])
    change = adversary(linear, torch.zeros(5, 2), settings, scale, torch.full((2, 5, 2), 0.01))
    length = change.abs().amax(-1) if norm == "linf" else change.norm(dim=-1)
    assert (length <= 0.1 + 1e-6).all()
    found = slope_penalty(linear, torch.zeros(5, 2), settings, scale, generator())
    assert found.item() == pytest.approx(2 * (3.0 * 10 * 0.1) ** 2, rel=0.05)


@pytest.mark.parametrize(("epsilon", "weight", "expected"), [(1.0, 0.0, 2.0), (1.0, 1.0, 1.0), (1.0, 3.0, 0.5), (0.5, 4.0, 1.0)])
def test_the_penalty_shrinks_the_slope_of_a_line(epsilon: float, weight: float, expected: float) -> None:
    """Fitting y = 2 x, x of variance 1: the slope is 2 / (1 + weight epsilon^2), wherever the states are."""
    settings = Lipschitz.model_validate({**ROBUST, "epsilon": epsilon})
    for origin in (0.0, 50.0):
        slope = torch.tensor(0.3, requires_grad=True)
        state = torch.tensor([[-1.0], [1.0]]) + origin
        for _ in range(60):
            penalty = slope_penalty(lambda at, w=slope: w * at[..., 0], state, settings, torch.ones(1), generator())
            error = (slope * (state - origin) - 2.0 * (state - origin)).square().mean()
            (rate,) = torch.autograd.grad(error + weight * penalty, slope)
            with torch.no_grad():
                slope -= 0.12 * rate
        assert slope.item() == pytest.approx(expected, abs=0.01)


def test_the_clean_value_may_be_held_fixed() -> None:
    """The gradient by w of (w (s + d) - w s)^2 is 2 w d^2, or 2 w d (s + d) if the second term is held."""
    slope, state = torch.tensor(1.5, requires_grad=True), torch.tensor([[2.0]])
    for stop, expected in ((False, [0.03, 0.03]), (True, [0.3 * 2.1, -0.3 * 1.9])):
        settings = Lipschitz.model_validate({**ROBUST, "epsilon": 0.1, "stop_clean": stop})
        penalty = slope_penalty(lambda at: slope * at[..., 0], state, settings, torch.ones(1), generator())
        (found,) = torch.autograd.grad(penalty, slope)
        assert min(abs(found.item() - one) for one in expected) < 1e-5


@pytest.mark.parametrize(
    "lipschitz",
    [
        {"kind": "robust", "weight": 0.0},
        {"kind": "robust", "epsilon": 0.0},
        {"kind": "spectral", "beta": 1e9},
    ],
)
def test_without_an_effect_the_critics_are_those_of_sac(lipschitz: dict[str, object]) -> None:
    """To the bit, the draws included."""
    agents = []
    for values in ({}, {"lipschitz": lipschitz}):
        torch.manual_seed(0)
        agent, draw = Agent(OffPolicy.model_validate({"width": 16, **values}), 3, 1), generator()
        for _ in range(5):
            agent.update(batch(), draw)
        agents.append(agent)
    for one, other in zip(agents[0].parameters(), agents[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_slopes_of_a_bounded_network(activation: str) -> None:
    """Layers of norm at most 1 and an activation of slope at most 1."""
    torch.manual_seed(0)
    network = Ensemble(2, 4, 32, 2, 1, activation, largest_norm=1.0)
    with torch.no_grad():
        for weight in network.weights:
            weight.mul_(20.0)
    network.measure(50)
    one, other = 3 * torch.randn(2, 1000, 4)
    assert ((network(one) - network(other)).abs()[..., 0] <= (one - other).norm(dim=-1) + 1e-4).all()
    assert network.norms().max().item() == pytest.approx(1.0, abs=1e-3)


def test_the_penalty_moves_the_critics_alone() -> None:
    torch.manual_seed(0)
    agent = Agent(OffPolicy.model_validate({"width": 8, "lipschitz": ROBUST}), 3, 1)
    agent.robust_loss(batch(), generator()).backward()
    assert all(parameter.grad is None for parameter in (*agent.policy.parameters(), *agent.slow_critics.parameters()))
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in agent.critics.parameters())


@pytest.mark.parametrize("lipschitz", [{"kind": "robust", "weight": 5.0}, {"kind": "spectral", "beta": 0.3}])
def test_regularised_critics_have_smaller_slopes(lipschitz: dict[str, object]) -> None:
    found = []
    for values in ({}, {"lipschitz": lipschitz}):
        torch.manual_seed(0)
        agent, draw = Agent(OffPolicy.model_validate({"width": 16, "learning_rate": 1e-2, **values}), 3, 1), generator()
        data = batch(64)
        data.reward.copy_(10 * (data.observation[:, 0] > 0.5))
        for _ in range(80):
            agent.update(data, draw)
        found.append(agent.slopes(data).mean().item())
    assert found[1] < 0.7 * found[0]


def test_slopes_by_hand() -> None:
    found = local_slopes(linear, torch.zeros(4, 2), torch.tensor([1.0, 2.0]))
    assert found.flatten().tolist() == pytest.approx([(9 + 64) ** 0.5] * 8)


def test_noise_of_a_single_models_predictions() -> None:
    """Noise of 0.5 on the state gives V = 2 s the variance 1."""
    model = WorldModel(Dynamics(output_noise=0.5), 1, 1)
    state = torch.zeros(20_000, 1)
    following, _ = model.predictions(state, state, generator())
    assert (2.0 * following[0, :, 0]).var().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "spectral", "epsilon": 0.2}, "lipschitz.epsilon has no effect: it needs kind: robust"),
        ({"kind": "robust", "beta": 2.0}, "lipschitz.beta has no effect: it needs kind: spectral"),
        ({"kind": "lasso"}, "Input should be 'none', 'spectral' or 'robust'"),
        ({"kind": "spectral", "beta": 0.0}, "greater than 0"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OffPolicy.model_validate({"lipschitz": values})
