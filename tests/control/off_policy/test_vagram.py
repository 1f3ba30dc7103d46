"""Value-aware model losses: the paper's worked examples, what they reduce to, gradients, refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.imagination import Imagination
from stages.control.off_policy.model_settings import Dynamics
from stages.control.off_policy.replay import Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.control.off_policy.world_model import WorldModel
from stages.values.settings import ValueAware
from stages.values.vagram import clipped, gaussian_loss, state_loss, weights_of

PLAIN = {"clip_quantile": None}


def loss(kind: str, errors: list[float] | torch.Tensor, gradient: list[float]) -> torch.Tensor:
    return state_loss(kind, torch.as_tensor(errors), torch.tensor(gradient)[None])


def test_losses_of_one_error() -> None:
    """D = (0.5, -1), g = (2, 1): VaGraM 2 in all, VAML 0, squared error 1.25 in all."""
    found = {kind: loss(kind, [0.5, -1.0], [2.0, 1.0]).item() for kind in ("vagram", "vaml", "mse")}
    assert found == pytest.approx({"vagram": 1.0, "vaml": 0.0, "mse": 0.625})


def test_vaml_is_at_most_its_bound() -> None:
    errors, gradients = torch.randn(2, 4, 1000, 5, generator=torch.Generator().manual_seed(0))
    vaml, vagram = (state_loss(kind, errors, gradients[:, :, :]) for kind in ("vaml", "vagram"))
    assert (vaml <= 5 * 5 * vagram + 1e-4).all()


def test_equal_gradients_give_the_squared_error() -> None:
    """In value, (0.09 + 4 + 1) / 3, and gradient."""
    errors = torch.tensor([0.3, -2.0, 1.0], requires_grad=True)
    losses = [loss(kind, errors, [1.0, 1.0, 1.0]) for kind in ("vagram", "mse")]
    assert [one.item() for one in losses] == pytest.approx([5.09 / 3] * 2)
    assert torch.equal(*(torch.autograd.grad(one, errors)[0] for one in losses))


@pytest.mark.parametrize(("kind", "expected"), [("mse", 2.0), ("vagram", 1.2), ("vaml", 1.5)])
def test_minimisers_of_a_shared_parameter(kind: str, expected: float) -> None:
    """One parameter predicts both dimensions, whose targets are 1 and 3, with g = (3, 1)."""
    parameter = torch.tensor(expected, requires_grad=True)
    loss(kind, parameter - torch.tensor([1.0, 3.0]), [3.0, 1.0]).backward()
    assert parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(0.0, abs=1e-5)


def test_long_gradients_are_shortened() -> None:
    """Of lengths 1, 2, 3 and 100, the 95 % quantile is 85.45."""
    gradients = torch.diag(torch.tensor([1.0, 2.0, 3.0, 100.0]))[None]
    found = clipped(gradients, 0.95)[0].diagonal() / gradients[0].diagonal()
    assert found.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.8545], abs=1e-4)


@pytest.mark.parametrize(("per_head", "expected"), [("exact", 4.0), ("cumulative", 30.0)])
def test_accumulated_gradients(per_head: str, expected: float) -> None:
    """Four critics of gradient 2 and an error of 1: the mean of the squares is 4, not (4 + 16 + 36 + 64) / 4."""
    settings = ValueAware.model_validate({**PLAIN, "per_head": per_head})
    weights = weights_of(torch.full((4, 1, 1), 2.0), torch.ones(1), settings)
    assert state_loss("vagram", torch.ones(1, 1), weights).item() == pytest.approx(expected)


def test_units_leave_the_loss_and_unit_gradients_set_its_scale() -> None:
    gradients, unit = torch.tensor([[[3.0, 4.0]]]), torch.tensor([2.0, 0.5])
    errors = torch.tensor([[0.1, 0.2]])
    weights = weights_of(gradients, unit, ValueAware.model_validate(PLAIN))
    assert torch.allclose(state_loss("vagram", errors / unit, weights), state_loss("vagram", errors, gradients))
    scaled = weights_of(gradients, unit, ValueAware.model_validate({**PLAIN, "unit_gradients": True}))
    assert scaled.square().mean().item() == pytest.approx(1.0)


def transitions(count: int = 8) -> Transitions:
    draw = torch.Generator().manual_seed(0)
    shapes = ((3,), (1,), (), (3,))
    return Transitions(*(torch.randn(count, *shape, generator=draw) for shape in shapes), torch.zeros(count))


def members(data: Transitions, count: int = 1) -> Transitions:
    """The same transitions for every member, [M, B, ...]."""
    fields = (data.observation, data.action, data.reward, data.following, data.terminated)
    return Transitions(*(value.expand(count, *value.shape) for value in fields))


def test_a_dimension_without_value_gets_no_gradient() -> None:
    torch.manual_seed(0)
    model = WorldModel(Dynamics(loss="vagram", width=8), 3, 1)
    weights = torch.ones(2, 1, 8, 3)
    weights[..., 1] = 0.0
    model.loss(members(transitions()), weights, plain=False).sum().backward()
    gradient = model.network.weights[-1].grad
    assert gradient is not None
    assert not gradient[..., 1].any()
    assert gradient[..., [0, 2, 3]].all()


@pytest.mark.parametrize("warm_up", ["none", "first_fit", "always"])
def test_the_first_fit_adds_the_squared_error(warm_up: str) -> None:
    settings = OffPolicy.model_validate({"dynamics": {"loss": "vagram", "width": 8, "value_aware": {"warm_up": warm_up}}})
    imagination = Imagination(settings, 3, 1)
    data, weights, found = members(transitions()), torch.rand(2, 1, 8, 3), []
    for imagination.fits in (0, 1):
        found.append(imagination.model.loss(data, weights, imagination.plain).item())
    errors = imagination.model(data.observation, data.action)[0][..., :-1] - (data.following - data.observation)
    added = errors.square().mean(-1).mean().item()
    assert found[0] - found[1] == pytest.approx(added if warm_up == "first_fit" else 0.0, abs=1e-5)
    assert imagination.plain == (warm_up == "always")


def test_the_gradient_of_a_known_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """V = s'P s' / 2 has the gradient P s'; nothing reaches the parameters, and the action is held fixed."""
    torch.manual_seed(0)
    agent = Agent(OffPolicy(width=8, activation="silu"), 3, 1)
    root = torch.randn(3, 3)
    matrix, state = root @ root.T, torch.randn(5, 3)
    with monkeypatch.context() as patch:
        patch.setattr(agent, "_values_at", lambda critics, action, at: 0.5 * (at * (at @ matrix)).sum(-1))
        found = agent.value_gradients(state, "all")
    assert found.shape == (4, 5, 3)
    assert torch.allclose(found, (state @ matrix).expand(4, -1, -1), atol=1e-5)
    found = agent.value_gradients(state, "target")
    assert found.shape == (2, 5, 3)
    assert all(parameter.grad is None for parameter in agent.parameters())
    action, step = agent.policy.greedy(state), 1e-2 * torch.eye(3)[0]
    values = [agent._values_at(agent.slow_critics, action, at[None]) for at in (state + step, state - step)]
    assert torch.allclose((values[0] - values[1]) / 2e-2, found[..., 0], atol=1e-3)


def test_the_likelihood_of_a_gaussian() -> None:
    errors, log_std = torch.tensor([0.4, -1.0]), torch.tensor([0.2, -0.3])
    likelihood = torch.distributions.Normal(torch.zeros(2), log_std.exp()).log_prob(errors)
    expected = -(likelihood + 0.5 * torch.log(torch.tensor(2 * torch.pi))).mean()
    assert gaussian_loss(errors, log_std).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": "nll"}, "loss nll does not fit kind: deterministic, whose loss is mse, vaml or vagram"),
        ({"kind": "probabilistic"}, "loss mse does not fit kind: probabilistic, whose loss is nll"),
        ({"value_aware": {"heads": "target"}}, "value_aware has no effect with loss: mse"),
        ({"elites": 2}, "elites 2 are more than members 1"),
        ({"horizon": {"begin": 5, "end": 5}}, "begin 5 must be below end 5"),
        ({"loss": "huber"}, "Input should be 'mse', 'nll', 'vaml' or 'vagram'"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OffPolicy.model_validate({"dynamics": values})
