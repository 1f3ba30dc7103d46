"""DSAC-T: its loss by hand, the spread's fixed points, and what it reduces to."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from stages.control.off_policy.agent import Agent
from stages.control.off_policy.replay import Replay, Transitions
from stages.control.off_policy.settings import OffPolicy
from stages.records.sections import params_hash
from stages.values import gaussian as dsac_t
from stages.values.ensemble import Ensemble
from stages.values.settings import GaussianCritic, ReturnDistribution


def gradients(
    q: float, std: float, running: float, expected: float, sampled: float, **keys: object
) -> tuple[float, float, float]:
    """Loss of one sample of one critic, and its gradients by the mean and the spread."""
    mean, spread = torch.tensor([[q]], requires_grad=True), torch.tensor([[std]], requires_grad=True)
    targets = torch.tensor([expected]), torch.tensor([sampled])
    loss = dsac_t.critic_loss(mean, spread, *targets, torch.tensor([running]), GaussianCritic.model_validate(keys))
    by_mean, by_spread = torch.autograd.grad(loss, (mean, spread))
    return float(loss.detach()), float(by_mean), float(by_spread)


def test_one_sample_by_hand() -> None:
    """Clipped sample 2.5, ratio 0.25 / 0.35."""
    assert gradients(1.0, 0.5, 0.5, 2.0, 4.0) == pytest.approx((-0.1636905, -0.7142857, -1.0416667), abs=1e-6)


def test_a_sample_within_the_bound_is_not_clipped() -> None:
    assert gradients(1.0, 0.5, 0.5, 2.0, 2.2)[2] == pytest.approx(-0.5595238, abs=1e-6)


def test_expected_targets_can_be_switched_off() -> None:
    """The mean's gradient is then towards the sample, which is not clipped for it."""
    assert gradients(1.0, 0.5, 0.5, 2.0, 4.0, expected_target=False)[1] == pytest.approx(3 * -0.7142857, abs=1e-6)


def test_without_adjustment_the_bound_is_fixed() -> None:
    """As in DSAC: (Q - y) / (s^2 + 0.1), and (s^2 - (Q - y_c)^2) / (s^3 + 0.1) with the error clipped at 2."""
    _, by_mean, by_spread = gradients(1.0, 0.5, 0.5, 2.0, 4.0, adjusted=False, bound=2.0)
    assert (by_mean, by_spread) == pytest.approx((-1 / 0.35, (0.25 - 4) / 0.225), rel=1e-5)


def test_the_most_pessimistic_critic_gives_both_targets() -> None:
    mean, sampled = torch.tensor([[1.0], [0.8]]), torch.tensor([[0.2], [1.4]])
    assert [float(value) for value in dsac_t.most_pessimistic(mean, sampled)] == pytest.approx([0.8, 1.4])


def test_the_running_spread_begins_with_the_first_batch() -> None:
    first = dsac_t.running_spread(torch.tensor([float("nan")]), torch.tensor([[0.3, 0.5]]), 0.005)
    assert float(first) == pytest.approx(0.4)
    assert float(dsac_t.running_spread(first, torch.tensor([[0.6, 0.6]]), 0.005)) == pytest.approx(0.401)


@pytest.mark.parametrize(("running", "std", "ratio"), [(0.5, 1e-9, 2.5), (0.05, 1.0, 0.1), (5.0, 0.1, 10.0)])
def test_the_scale_of_gradients_has_limits(running: float, std: float, ratio: float) -> None:
    assert gradients(1.0, std, running, 0.0, 0.0)[1] == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("half", "clip", "expected"),
    [(True, 1e6, 0.707), (False, 1e6, 1.0), (True, 3.0, 0.68)],
)
def test_fixed_point_of_the_spread_on_noise(half: bool, clip: float, expected: float) -> None:
    """Targets N(0, 1) around a mean that is right; the running spread is that of the current batch."""
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    settings = GaussianCritic(half=half, clip=clip, huber=None)
    std = torch.tensor(0.3, requires_grad=True)
    for _ in range(60):
        spread = std.expand(1, len(noise))
        loss = dsac_t.critic_loss(torch.zeros(1, len(noise)), spread, noise, noise, std.detach()[None], settings)
        std.data -= 0.3 * torch.autograd.grad(loss, std)[0]
    assert float(std.detach()) == pytest.approx(expected, abs=0.03)


def test_with_constant_spread_and_scale_one_it_is_the_squared_error() -> None:
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(2, 50, generator=generator, requires_grad=True)
    target, sampled = torch.randn(50, generator=generator), torch.randn(50, generator=generator)
    std = torch.full((2, 50), 0.7)
    running = torch.full((2,), (0.7**2 + GaussianCritic().std_eps) ** 0.5)
    loss = dsac_t.critic_loss(mean, std, target, sampled, running, GaussianCritic(huber=None))
    squared = 0.5 * ((mean - target) ** 2).mean(1).sum()
    found, expected = (torch.autograd.grad(value, mean)[0] for value in (loss, squared))
    assert torch.allclose(found, expected, atol=1e-6)


def test_large_errors_count_linearly() -> None:
    """Beyond the Huber bound the mean's gradient no longer grows."""
    steep, steeper = (gradients(0.0, 0.5, 0.35**0.5, y, 0.0, huber=5.0)[1] for y in (6.0, 60.0))
    assert steep == pytest.approx(-5.0)
    assert steeper == pytest.approx(-5.0)


def test_samples_stay_within_three_deviations() -> None:
    mean: Tensor = torch.zeros(2, 5000)
    drawn = dsac_t.sample(mean, torch.full_like(mean, 2.0), torch.Generator().manual_seed(3))
    assert float(drawn.abs().max()) == pytest.approx(6.0)
    assert float(drawn.std()) == pytest.approx(2.0, rel=0.05)


def test_divisors_and_the_range_of_the_scale_are_settings() -> None:
    """Ratio 0.25 / (0.25 + 0.25) within 0.6 and 2, times the mean's error; the spread's is (0.25 - 1.125) / 0.75."""
    _, by_mean, by_spread = gradients(1.0, 0.5, 0.5, 2.0, 4.0, std_eps=0.25, ratio_range=[0.6, 2.0])
    assert (by_mean, by_spread) == pytest.approx((-0.6, 0.6 * (0.25 - 1.125) / 0.75))
    _, by_mean, by_spread = gradients(1.0, 0.5, 0.5, 2.0, 4.0, adjusted=False, bound=2.0, std_eps=0.25)
    assert (by_mean, by_spread) == pytest.approx((-1 / 0.5, (0.25 - 4) / 0.375), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "by_mean", "by_spread"),
    [
        ({"scaled": "mean"}, -0.25 / 0.35, (0.25 - 1.125) / 0.6),
        ({"scale_eps": 0.05}, -0.3 / 0.35, 0.3 / 0.35 * (0.25 - 1.125) / 0.6),
        ({"scale_of": "variance"}, -0.28 / 0.35, 0.28 / 0.35 * (0.25 - 1.125) / 0.6),
        ({"scale_of": "variance", "scale_eps": 0.07, "scaled": "mean"}, -1.0, (0.25 - 1.125) / 0.6),
    ],
)
def test_other_forms_of_the_scale_by_hand(values: dict[str, object], by_mean: float, by_spread: float) -> None:
    """Q 1, s 0.5, b 0.5, E s^2 0.28; the sample is clipped at 2.5 in all, since the bound follows b."""
    settings = GaussianCritic.model_validate(values)
    mean, spread = torch.tensor([[1.0]], requires_grad=True), torch.tensor([[0.5]], requires_grad=True)
    square = torch.tensor([0.28]) if settings.scale_of == "variance" else None
    targets = torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([0.5])
    loss = dsac_t.critic_loss(mean, spread, *targets, settings, square)
    found = [float(one) for one in torch.autograd.grad(loss, (mean, spread))]
    assert found == pytest.approx([by_mean, by_spread], rel=1e-5)


def test_the_running_variance_is_the_mean_of_squares() -> None:
    """It begins with the first batch's mean of s^2, at least the square of the mean of s, and is in the state that is saved."""
    torch.manual_seed(0)
    settings = {"width": 8, "critic": "gaussian", "gaussian": {"scale_of": "variance", "spread_rate": 0.5}}
    agent, data = Agent(OffPolicy.model_validate(settings), 3, 1), transitions(32, 0.0)

    def squares() -> Tensor:
        with torch.no_grad():
            return dsac_t.distribution(agent.critics(torch.cat([data.observation, data.action], -1)))[1].square().mean(1)

    first = squares()
    agent.update(data, torch.Generator().manual_seed(0))
    assert torch.allclose(agent.square, first)
    second = squares()
    agent.update(data, torch.Generator().manual_seed(0))
    assert torch.allclose(agent.square, (first + second) / 2)
    assert (agent.square >= agent.running**2).all()
    assert "square" in agent.state_dict()
    assert "square" not in Agent(OffPolicy(width=8, critic="gaussian"), 3, 1).state_dict()


def test_rounds_of_updates_are_so_many_steps_apart() -> None:
    """Two updates per step of two environments: four after every sixth step."""
    agent = Agent(
        OffPolicy(width=8, environments=2, evaluate_every=12, steps=12, warm_up=2, update_every=6, updates_per_step=2), 3, 1
    )
    replay = Replay(4, 3, 1)
    replay.add(transitions(4, 0.0))
    assert [agent.stepped(replay, steps) for steps in (2, 4, 6, 8, 10, 12)] == [0, 0, 4, 0, 0, 4]


def test_the_policys_spread_has_a_range() -> None:
    torch.manual_seed(0)
    agent = Agent(OffPolicy(width=8, log_std_range=[-20.0, 0.5]), 3, 1)
    with torch.no_grad():
        agent.policy.network.biases[-1][..., 1] = 30.0
        found = agent.policy(torch.zeros(1, 3))[1].tolist()
        agent.policy.network.biases[-1][..., 1] = -30.0
        assert (found, agent.policy(torch.zeros(1, 3))[1].tolist()) == ([[0.5]], [[-20.0]])


def test_gelu_by_hand() -> None:
    """x Phi(x) at 1, times a weight of 2."""
    torch.manual_seed(0)
    network = Ensemble(1, 1, 1, 1, 1, "gelu")
    with torch.no_grad():
        for weights, value in zip(network.weights, (1.0, 2.0), strict=True):
            weights.fill_(value)
        for biases in network.biases:
            biases.zero_()
        assert network(torch.ones(1, 1)).item() == pytest.approx(2 * 0.8413447, abs=1e-6)


def test_added_settings_change_no_hash() -> None:
    values = GaussianCritic().model_dump(mode="json")
    added = ("std_eps", "ratio_range", "scale_of", "scale_eps", "scaled")
    assert params_hash(values) == params_hash({key: values[key] for key in values if key not in added})
    assert params_hash(values | {"std_eps": 0.2}) != params_hash(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ratio_range": [2.0, 1.0]}, "the first, the least scale, must not be above the second"),
        ({"ratio_range": [1.0]}, "at least 2 items"),
        ({"ratio_range": [0.1, 5.0], "adjusted": False}, "ratio_range has no effect with adjusted: false"),
        ({"std_eps": 0.0}, "greater than 0"),
        ({"scaled": "mean", "adjusted": False}, "scaled has no effect with adjusted: false"),
        ({"scale_of": "range"}, "Input should be 'spread' or 'variance'"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GaussianCritic.model_validate(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"environments": 2, "update_every": 5}, "update_every 5 must be a multiple of environments 2"),
        ({"log_std_range": [0.5, 0.5]}, "the first must be below the second"),
        ({"activation": "elu"}, "Input should be 'relu'"),
    ],
)
def test_bad_settings_of_the_agent_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OffPolicy.model_validate(values)


def test_the_critics_of_rl_keep_no_mean_of_squares() -> None:
    with pytest.raises(ValidationError, match=r"scale_of: variance needs the running mean of the spread's square"):
        ReturnDistribution.model_validate({"scale_of": "variance"})


def transitions(count: int, terminated: float) -> Transitions:
    generator = torch.Generator().manual_seed(5)
    seen, action, reward, following = (torch.randn(count, *shape, generator=generator) for shape in ((3,), (1,), (), (3,)))
    return Transitions(seen, action.clamp(-1, 1), reward, following, torch.full((count,), terminated))


SPREAD = 0.7


def pair() -> tuple[Agent, Agent]:
    """DSAC-T with a spread of SPREAD whatever the state and a scale of 1, and SAC with the same weights of the mean."""
    torch.manual_seed(0)
    sac = Agent(OffPolicy(width=8), 3, 1)
    shape = {"huber": None, "spread_rate": 1e-9}
    ours = Agent(OffPolicy.model_validate({"width": 8, "critic": "gaussian", "gaussian": shape}), 3, 1)
    ours.policy.load_state_dict(sac.policy.state_dict())
    with torch.no_grad():
        for critics, plain in ((ours.critics, sac.critics), (ours.slow_critics, sac.slow_critics)):
            *hidden, last = zip(critics.weights, plain.weights, critics.biases, plain.biases, strict=True)
            for weight, other, bias, other_bias in hidden:
                weight.copy_(other)
                bias.copy_(other_bias)
            for outputs, mean in (last[:2], last[2:]):
                outputs[..., :1].copy_(mean)
                outputs[..., 1].zero_()
            last[2][..., 1].fill_(torch.tensor(SPREAD).expm1().log())
        ours.running.fill_((SPREAD**2 + ours.settings.gaussian.std_eps) ** 0.5)
    return ours, sac


def gradient(loss: Tensor, parameters: list[nn.Parameter], outputs: slice = slice(None)) -> Tensor:
    """Side by side; of the last weights and biases, of some outputs alone."""
    found = torch.autograd.grad(loss, parameters)
    half = len(found) // 2
    parts = [part[..., outputs] if place in (half - 1, len(found) - 1) else part for place, part in enumerate(found)]
    return torch.cat([part.flatten() for part in parts])


def test_with_constant_spread_and_scale_one_both_gradients_are_sacs() -> None:
    """Contract: the agent's critics and policy descend what SAC's do, with half the mean squared error."""
    ours, sac = pair()
    data = transitions(32, 0.0)
    losses = [agent.critic_loss(data, torch.Generator().manual_seed(1)) for agent in (ours, sac)]
    found = gradient(losses[0], list(ours.critics.parameters()), slice(1))
    assert torch.allclose(found, gradient(losses[1], list(sac.critics.parameters())), atol=1e-6)
    actors = [
        torch.autograd.grad(agent.policy_loss(data, torch.Generator().manual_seed(2)), list(agent.policy.parameters()))
        for agent in (ours, sac)
    ]
    for one, other in zip(*actors, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert actors[0][0].abs().max() > 1e-4


def test_at_the_end_both_targets_are_the_reward() -> None:
    """Contract: d = 1 gives y_q = y_z = r; what the slow critics say does not matter."""
    torch.manual_seed(0)
    agent, data = Agent(OffPolicy(width=8, critic="gaussian"), 3, 1), transitions(16, 1.0)
    found = agent.critic_loss(data, torch.Generator().manual_seed(1)).item()
    mean, std = dsac_t.distribution(agent.critics(torch.cat([data.observation, data.action], -1)))
    running = std.mean(1)
    expected = dsac_t.critic_loss(mean, std, data.reward, data.reward, running, GaussianCritic())
    assert found == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        ({}, (1e-3, 1e-3, 1e-3)),
        ({"learning_rate": 1e-4, "alpha_learning_rate": 3e-4}, (1e-4, 1e-4, 3e-4)),
        ({"policy_learning_rate": 2e-3}, (1e-3, 2e-3, 2e-3)),
        ({"policy_learning_rate": 2e-3, "alpha_learning_rate": 5e-3}, (1e-3, 2e-3, 5e-3)),
    ],
)
def test_critics_policy_and_alpha_have_learning_rates_of_their_own(values: dict, rates: tuple[float, float, float]) -> None:
    """Adam's first step is about the learning rate, in the direction of the gradient's sign."""
    torch.manual_seed(0)
    agent = Agent(OffPolicy.model_validate({"width": 8, **values}), 3, 1)
    parts = (list(agent.critics.parameters()), list(agent.policy.parameters()), [agent.log_alpha])
    before = [nn.utils.parameters_to_vector(part).detach().clone() for part in parts]
    agent.update(transitions(32, 0.0), torch.Generator().manual_seed(0))
    moved = [(nn.utils.parameters_to_vector(part) - old).abs().max().item() for part, old in zip(parts, before, strict=True)]
    assert moved == pytest.approx(rates, rel=1e-2)


def test_a_learning_rate_of_an_alpha_that_is_fixed_is_refused() -> None:
    with pytest.raises(ValidationError, match="alpha_learning_rate has no effect with tune_alpha: false"):
        OffPolicy(tune_alpha=False, alpha_learning_rate=1e-3)
