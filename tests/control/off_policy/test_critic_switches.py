"""Switches of the critics, by hand: aggregates, features of length 1, forms of the spectral bound, starts and robust targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from stages.control.off_policy.adversaries import better_end, lowest, penalty
from stages.control.off_policy.agent import Agent
from stages.control.off_policy.critics import BoundedCritics, UnitFeatures
from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.settings import CriticLipschitz, OffPolicy
from stages.values.ensemble import Ensemble
from stages.values.pessimism import aggregated

SLOPES = torch.tensor([3.0, -4.0])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def robust(**values: Any) -> CriticLipschitz:
    return CriticLipschitz.model_validate({"kind": "robust", "weight": 1.0, "epsilon": 0.1, **values})


def linear(state: torch.Tensor) -> torch.Tensor:
    """Two critics with Q = 3 s_1 - 4 s_2, [2, B] of [1 or 2, B, 2]."""
    return (state @ SLOPES).expand(2, -1)


def agent_of(**values: Any) -> Agent:
    torch.manual_seed(0)
    return Agent(OffPolicy.model_validate({"width": 8, **values}), 3, 1)


def batch(count: int = 16) -> Transitions:
    shapes = ((3,), (1,), (), (3,))
    return Transitions(*(torch.rand(count, *shape, generator=generator(count)) for shape in shapes), torch.zeros(count))


@torch.no_grad()
def constant(critics: Ensemble, values: list[float]) -> None:
    """Make each member's value a constant."""
    critics.weights[-1].zero_()
    critics.biases[-1].copy_(torch.tensor(values)[:, None, None])


@pytest.mark.parametrize(("aggregate", "ahead"), [("min", 1.0), ("mean", 2.0), ("min_of_2", (1.0 + 1.0 + 2.0) / 3)])
def test_targets_and_policy_use_the_aggregate(aggregate: str, ahead: float) -> None:
    """r = 0.5, gamma 0.99 and next values (1, 3, 2): 1.49 of the minimum, 2.48 of the mean, 1.82 of the pairs' smaller ones. A
    critic at 0 loses half its square."""
    agent = agent_of(critics=3, alpha=1e-30, aggregate=aggregate)
    constant(agent.slow_critics, [1.0, 3.0, 2.0])
    constant(agent.critics, [0.0, 0.0, 0.0])
    data = batch(1)
    data.reward.fill_(0.5)
    target = 0.5 + 0.99 * ahead
    assert agent.critic_loss(data, generator()).item() == pytest.approx(3 * 0.5 * target**2)
    constant(agent.critics, [1.0, 3.0, 2.0])
    assert agent.values(data.observation, data.action).item() == pytest.approx(ahead)
    tuned = -float(agent.log_alpha.detach()) * (agent.policy.sample(data.observation, generator())[1].item() - 1.0)
    assert agent.policy_loss(data, generator()).item() == pytest.approx(-ahead + tuned, rel=1e-4)


def test_pairs_by_brute_force() -> None:
    values = torch.randn(5, 40, generator=generator())
    pairs = [torch.minimum(values[one], values[other]) for one in range(5) for other in range(one)]
    assert torch.allclose(aggregated(values, "min_of_2"), torch.stack(pairs).mean(0))
    assert torch.equal(aggregated(values[:2], "min_of_2"), values[:2].amin(0))
    assert torch.equal(aggregated(values[:1], "min_of_2"), values[0])


def test_features_of_length_one_by_hand() -> None:
    """Features (3, 4) become (0.6, 0.8); their length no longer counts. Networks draw the same first weights as without."""
    network = UnitFeatures(1, 2, 2, 1, 1)
    with torch.no_grad():
        network.weights[0].copy_(torch.eye(2)[None])
        network.weights[1].copy_(torch.tensor([[[10.0], [1.0]]]))
        network.biases[0].zero_()
        network.biases[1].fill_(2.0)
    found = network(torch.tensor([[3.0, 4.0], [30.0, 40.0], [-1.0, -1.0]]))
    assert found.flatten().tolist() == pytest.approx([8.8, 8.8, 2.0])
    plain, unit = agent_of(), agent_of(unit_features=True)
    for one, other in zip(plain.parameters(), unit.parameters(), strict=True):
        assert torch.equal(one, other)
    assert isinstance(unit.policy.network, UnitFeatures)
    assert isinstance(unit.slow_critics, UnitFeatures)
    before = [parameter.clone() for parameter in unit.policy.parameters()]
    unit.update(batch(), generator())
    assert any(not torch.equal(one, other) for one, other in zip(before, unit.policy.parameters(), strict=True))


@pytest.mark.parametrize(
    ("free_last", "always", "expected"),
    [(False, False, [1.0, 0.5]), (True, False, [1.0, 0.5]), (False, True, [1.0, 1.0]), (True, True, [1.0, 0.5])],
)
def test_forms_of_the_spectral_bound(free_last: bool, always: bool, expected: list[float]) -> None:
    """Layers of norm 3 and 0.5 with beta 1: the second is below it, and is raised to it with `always` unless it is free."""
    critics = BoundedCritics(1, 2, 2, 1, 1, largest_norm=1.0)
    critics.free_last, critics.always = free_last, always
    with torch.no_grad():
        critics.weights[0].copy_(torch.diag(torch.tensor([3.0, 1.0]))[None])
        critics.weights[1].copy_(torch.tensor([[[0.3], [0.4]]]))
    critics.measure(40)
    assert critics.norms()[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_the_last_layer_may_stay_free() -> None:
    """A norm of 5 in the last layer: cut to 1 with `layers: all`."""
    for layers, expected in (("all", 1.0), ("hidden", 5.0)):
        agent = agent_of(critics=1, lipschitz={"kind": "spectral", "beta": 1.0, "layers": layers})
        with torch.no_grad():
            agent.critics.weights[-1].zero_()[:, 0] = 5.0
        agent.critics.measure(20)
        assert agent.critics.norms()[0, -1].item() == pytest.approx(expected, abs=1e-4)


def test_a_zero_layer_has_no_norm_to_raise() -> None:
    critics = BoundedCritics(1, 2, 2, 1, 1, largest_norm=1.0)
    critics.always = True
    with torch.no_grad():
        critics.weights[1].zero_()
    critics.measure(3)
    critics(torch.ones(1, 2)).sum().backward()
    assert critics.weights[1].grad is not None
    assert critics.weights[1].grad.isfinite().all()
    assert critics.norms()[0, 1] == 0.0


@pytest.mark.parametrize(("norm", "expected"), [("linf", 0.49), ("l2", 0.25)])
@pytest.mark.parametrize("steps", [1, 3])
def test_both_signs_find_a_lines_largest_change_in_one_step(norm: str, expected: float, steps: int) -> None:
    """For slopes (3, -4) and a radius of 0.1: 0.7 and 0.5, squared, without a draw."""
    chosen, draws = robust(start="both_signs", norm=norm, steps=steps), generator()
    before = draws.get_state()
    found = penalty(linear, torch.zeros(5, 2), chosen, torch.ones(2), draws)
    assert found.item() == pytest.approx(2 * expected)
    assert torch.equal(draws.get_state(), before)


def test_the_better_end_is_the_one_that_changes_more() -> None:
    """Q = s + s^2 at 0 with a radius of 1: 2 upwards and 0 downwards; Q = s - s^2: the other way around."""
    state = torch.zeros(1, 1)
    for sign in (1.0, -1.0):
        found = better_end(lambda at, way=sign: at[..., 0] + way * at[..., 0] ** 2, state, robust(epsilon=1.0), torch.ones(1))
        assert found.item() == sign


@pytest.mark.parametrize(("norm", "expected"), [("linf", -0.7), ("l2", -0.5)])
def test_the_lowest_value_of_a_line(norm: str, expected: float) -> None:
    """3 s_1 - 4 s_2 around (1, 0) falls by 0.7 in the maximum norm, by 0.5 in the Euclidean one. There, a descent as long as the
    ball's diameter ends within 26 degrees of the lowest point, wherever it begins: at most 0.05 above it, and a step's length."""
    state, chosen = torch.tensor([[1.0, 0.0]]).repeat(4, 1), robust(norm=norm, steps=1 if norm == "linf" else 30)
    found = lowest(lambda at: at @ SLOPES, state, chosen, torch.ones(2), generator())
    assert found.tolist() == pytest.approx([3.0 + expected] * 4, abs=1e-6 if norm == "linf" else 0.06)
    assert found.min() >= 3.0 + expected - 1e-6


def test_the_lowest_value_is_never_above_the_states_own() -> None:
    """Descent of |s| from 0 can only find more."""
    found = lowest(lambda at: at.abs().sum(-1), torch.zeros(50, 2), robust(), torch.ones(2), generator())
    assert found.tolist() == [0.0] * 50


def test_robust_targets_by_hand() -> None:
    """One critic, whose slow copy is 5 s: targets fall by 0.99 * 5 * 0.1, and its own loss is half the squared target."""
    losses = []
    for values in ({}, {"robust_target": True}):
        torch.manual_seed(0)
        settings = OffPolicy.model_validate(
            {"width": 2, "layers": 1, "critics": 1, "alpha": 1e-30, "lipschitz": {"kind": "robust", **values}}
        )
        agent = Agent(settings, 1, 1)
        constant(agent.critics, [0.0])
        with torch.no_grad():
            for parameter in agent.slow_critics.parameters():
                parameter.zero_()
            agent.slow_critics.weights[0][0, 0, 0] = 1.0
            agent.slow_critics.weights[1][0, 0, 0] = 5.0
        ones = torch.ones(1, 1)
        data = Transitions(ones, ones, torch.zeros(1), ones, torch.zeros(1))
        losses.append(agent.critic_loss(data, generator()).item())
    assert losses == pytest.approx([0.5 * (0.99 * 5.0) ** 2, 0.5 * (0.99 * 4.5) ** 2])


def updated(count: int, **values: Any) -> Agent:
    agent, draws = agent_of(**values), generator()
    for _ in range(count):
        agent.update(batch(), draws)
    return agent


def test_a_radius_of_zero_makes_no_target_robust() -> None:
    """To the bit, the draws included."""
    plain, found = updated(4), updated(4, lipschitz={"kind": "robust", "epsilon": 0.0, "robust_target": True})
    for one, other in zip(plain.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)


def test_slow_copies_move_on_every_fourth_update() -> None:
    """After the first, and again after the fifth. Without the setting, with the policy."""
    first = updated(1, target_every=4).slow_critics.weights[0]
    assert not torch.equal(first, agent_of().slow_critics.weights[0])
    assert torch.equal(updated(4, target_every=4).slow_critics.weights[0], first)
    assert not torch.equal(updated(5, target_every=4).slow_critics.weights[0], first)
    for one, other in zip(updated(5, delay=2).parameters(), updated(5, delay=2, target_every=2).parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_target_entropy() -> None:
    """Alpha's loss at log alpha 1 is -(log pi + target)."""
    found = []
    for values in ({}, {"target_entropy": -1.0}, {"target_entropy": -3.0}):
        agent = agent_of(alpha=2.718281828, **values)
        found.append(agent.policy_loss(batch(), generator()).item())
    assert found[0] == found[1]
    assert found[2] - found[1] == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"aggregate": "median"}, "Input should be 'min', 'mean' or 'min_of_2'"),
        ({"aggregate": "mean", "critics": 1}, "aggregate has no effect: it needs critic: scalar with two critics or more"),
        ({"aggregate": "mean", "critic": "gaussian"}, "aggregate has no effect: it needs critic: scalar"),
        ({"target_entropy": -2.0, "tune_alpha": False}, "target_entropy has no effect with tune_alpha: false"),
        ({"target_every": 0}, "greater than or equal to 1"),
        ({"unit_features": True, "lipschitz": {"kind": "spectral"}}, "spectral bounds no slope with unit_features"),
        ({"critic": "gaussian", "lipschitz": {"kind": "robust", "robust_target": True}}, "robust_target needs critic: scalar"),
        ({"lipschitz": {"kind": "robust", "layers": "hidden"}}, "lipschitz.layers has no effect: it needs kind: spectral"),
        (
            {"lipschitz": {"kind": "robust", "reciprocal": "always"}},
            "lipschitz.reciprocal has no effect: it needs kind: spectral",
        ),
        ({"lipschitz": {"kind": "spectral", "start": "both_signs"}}, "lipschitz.start has no effect: it needs kind: robust"),
        ({"lipschitz": {"robust_target": True}}, "lipschitz.robust_target has no effect: it needs kind: robust"),
        ({"lipschitz": {"kind": "robust", "start": "zero"}}, "Input should be 'random' or 'both_signs'"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OffPolicy.model_validate(values)
