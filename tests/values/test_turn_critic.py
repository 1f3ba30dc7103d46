"""The turn-level critic: targets by hand, expectiles, fixed points by brute force, initial values."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from stages.agent.logprobs import predicting_states, states_at
from stages.agent.policy import load_policy
from stages.agent.shared_prefixes import sharing_states
from stages.values.heads import make_head
from stages.values.settings import HeadParams
from stages.values.step_value import StepValueModel
from stages.values.turn_critic import Target, TurnCriticModel, Turns, expectile_weights, losses, polyak_update

MSE = HeadParams(loss="mse")
WIDE: dict[str, Any] = {"v_min": -8.0, "v_max": 4.0, "bins": 121}


@pytest.fixture(scope="module")
def backbone(tiny_policy):
    return load_policy(tiny_policy, attention="sdpa").model.base_model


def critic_of(backbone: Any, head: HeadParams = MSE, states: Any = predicting_states, **start: Any) -> TurnCriticModel:
    return TurnCriticModel(copy.deepcopy(backbone), head, states, 0, **start).eval()


def some_turns(rewards: list[list[float]]) -> Turns:
    """Two prompt tokens, then turns of two tokens, with one environment token between turns."""
    count, most = len(rewards), max(len(row) for row in rewards)
    before, after = torch.full((count, most + 1), -1), torch.full((count, most), -1)
    padded = torch.zeros(count, most)
    for row, given in enumerate(rewards):
        for turn, reward in enumerate(given):
            before[row, turn], after[row, turn], padded[row, turn] = 1 + 3 * turn, 3 + 3 * turn, reward
    ids = torch.randint(4, 60, (count, 1 + 3 * most), generator=torch.Generator().manual_seed(1))
    return Turns(ids, before, after, padded)


def set_values(critic: TurnCriticModel, q: tuple[float, float], v: tuple[float, float]) -> None:
    """Make an mse critic predict these values everywhere."""
    for reader, value in zip((*critic.q, *critic.v), (*q, *v), strict=True):
        torch.nn.init.constant_(reader.linear.bias, value)


def test_q_target_by_hand(backbone) -> None:
    """r = -1, gamma 0.95, V'(s') = -4: -4.8 if the episode continues and -1 at its end; each twin uses its own V'."""
    critic, target = critic_of(backbone), critic_of(backbone)
    set_values(target, (0.0, 0.0), (-4.0, -2.0))
    found = losses(critic, target, some_turns([[-1.0, -1.0]]), 0.95, None, 0.5)
    torch.testing.assert_close(-found.q_error[:, 0], torch.tensor([[-4.8, -1.0], [-1.0 - 0.95 * 2.0, -1.0]]))
    torch.testing.assert_close(found.q[:, 0], found.q_error[:, 0].square())


@pytest.mark.parametrize("loss", ["mse", "two_hot", "hl_gauss", "c51"])
def test_bootstrapped_target_is_the_same_with_every_head(loss: str) -> None:
    """The decoded target is r + gamma V', whatever the head; c51 projects the whole distribution."""
    head = make_head(HeadParams(loss=loss, **WIDE))
    logits = (
        head.encode(torch.tensor([-4.0, -4.0])) if loss == "mse" else head.encode(torch.tensor([-4.0, -4.0])).clamp(1e-9).log()
    )
    logits = logits[:, None] if loss == "mse" else logits
    target = Target.bootstrapped(head, logits, torch.tensor(-1.0), torch.tensor([0.95, 0.0]))
    torch.testing.assert_close(target.values, torch.tensor([-4.8, -1.0]), atol=1e-3, rtol=0)
    if loss == "c51":
        assert target.distribution is not None
        torch.testing.assert_close((target.distribution * head.support).sum(-1), target.values, atol=1e-3, rtol=0)


def test_expectile_by_hand(backbone) -> None:
    """tau 0.9: u = +1 costs 0.9 and u = -1 0.1; tau 0.5: u^2 / 2."""
    for tau, above, below in ((0.9, 0.9, 0.1), (0.5, 0.5, 0.5)):
        for q, expected in ((1.0, above), (-1.0, below)):
            critic, target = critic_of(backbone), critic_of(backbone)
            set_values(target, (q, q), (0.0, 0.0))
            found = losses(critic, target, some_turns([[0.0]]), 1.0, None, tau)
            torch.testing.assert_close(found.v.flatten(), torch.tensor([expected, expected]))


@pytest.mark.parametrize("loss", ["mse", "two_hot", "hl_gauss", "c51"])
@pytest.mark.parametrize(("tau", "expected"), [(0.5, 0.4), (0.9, None), (0.999, 1.0)])
def test_expectile_is_the_fixed_point_of_every_head(loss: str, tau: float, expected: float | None) -> None:
    """Three actions of Q 0, 0.2 and 1: V converges to the tau-expectile, by bisection: the mean at 0.5, the maximum at 1."""
    q = torch.tensor([0.0, 0.2, 1.0])

    def slope(v: float) -> float:
        return sum((tau if one > v else 1 - tau) * (one - v) for one in q.tolist())

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    if expected is not None:
        assert low == pytest.approx(expected, abs=0.005)
    head = make_head(HeadParams(loss=loss, v_min=-0.2, v_max=1.2, bins=43))
    logits = torch.zeros(head.outputs, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    for step in range(600):
        if step == 400:
            optimiser.param_groups[0]["lr"] = 0.005
        each = logits.expand(3, -1)
        with torch.no_grad():
            weights = expectile_weights(q - head.decode(each), tau)
        optimiser.zero_grad()
        (weights * head.loss(each, q)).sum().backward()
        optimiser.step()
    assert float(head.decode(logits.detach())) == pytest.approx(low, abs=0.01)


def test_v_is_the_mean_of_q_over_the_policys_actions(backbone) -> None:
    """Two actions with probability 1/2 each, Q' 1 and 0: V converges to 0.5, so that A is +0.5 and -0.5."""
    target = critic_of(backbone)
    turns = some_turns([[0.0], [0.0]])
    ids = turns.token_ids.clone()
    ids[1, :2] = ids[0, :2]  # one history
    hidden = states_at(predicting_states, target.backbone, ids, turns.after)[:, 0].double()
    weights = torch.linalg.lstsq(torch.cat([hidden, torch.ones(2, 1)], 1), torch.tensor([[1.0], [0.0]]).double()).solution[:, 0]
    for reader in target.q:
        reader.linear.weight.data.copy_(weights[None, :-1].float())
        reader.linear.bias.data.fill_(float(weights[-1]))
    torch.testing.assert_close(
        target.values(ids, turns.before[:, :-1], turns.after)[:, 0, :2].float(), torch.tensor([[1.0] * 2, [0.0] * 2])
    )
    # Both actions sampled for either row: the loss of V as a function of its bias is minimal at the mean.
    critic = critic_of(backbone)
    fresh = (ids[[0, 1, 0, 1]], turns.after[:, 0].repeat(2), 2)
    bias = critic.v[0].linear.bias
    (gradient,) = torch.autograd.grad(losses(critic, target, turns, 1.0, fresh, 0.5).v[0].sum(), bias)
    torch.testing.assert_close(gradient, torch.tensor([2 * 2 * (0.0 - 0.5)]))
    set_values(critic, (1.0, 1.0), (0.5, 0.5))
    (gradient,) = torch.autograd.grad(losses(critic, target, turns, 1.0, fresh, 0.5).v[0].sum(), bias)
    torch.testing.assert_close(gradient, torch.zeros(1), atol=1e-5, rtol=0)
    # Advantages of the two actions once Q equals the target's and V the mean.
    for learnt, known in zip(critic.q, target.q, strict=True):
        learnt.load_state_dict(known.state_dict())
    values = critic.values(ids, turns.before[:, :-1], turns.after)
    q, v = values[..., :2].min(-1).values, values[..., 2:].min(-1).values
    torch.testing.assert_close((q - v)[:, 0].float(), torch.tensor([0.5, -0.5]), atol=1e-4, rtol=0)


def test_values_of_final_turns_are_their_mean_reward(backbone) -> None:
    """If every turn is the last, Q of an action is the mean of its rewards, here 1 and 0, and so is V; the target's V, which
    differs, is not used."""
    turns = some_turns([[1.0], [0.0]])
    ids = turns.token_ids.clone()
    ids[1] = ids[0]  # one history and one action
    turns = Turns(ids, turns.before, turns.after, turns.rewards)
    critic, target = critic_of(backbone), critic_of(backbone)
    biases = [reader.linear.bias for reader in (*critic.q, *critic.v)]
    optimiser = torch.optim.Adam(biases, lr=0.02)
    for _ in range(120):
        set_values(target, (float(biases[0].detach()), float(biases[1].detach())), (-4.0, 9.0))
        found = losses(critic, target, turns, 0.9, None, 0.5)
        optimiser.zero_grad()
        (found.q + found.v).sum().backward()
        optimiser.step()
    values = critic.values(ids, turns.before[:, :-1], turns.after)
    torch.testing.assert_close(values, torch.full((2, 1, 4), 0.5), atol=0.01, rtol=0)


def test_polyak_by_hand() -> None:
    """tau 0.1 from 0 towards 1: 0.1, then 0.19; tau 1 copies; shared parameters do not change."""
    target, module = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    target.weight.data.fill_(0.0)
    module.weight.data.fill_(1.0)
    seen = []
    for tau in (0.1, 0.1, 1.0):
        polyak_update(target, module, tau)
        seen.append(round(float(target.weight.detach()), 6))
    assert seen == [0.1, 0.19, 1.0]
    assert float(module.weight) == 1.0
    shared = torch.nn.ModuleList([module])
    polyak_update(shared, torch.nn.ModuleList([module]), 0.5)
    assert float(module.weight) == 1.0


def test_fixed_point_in_a_known_game_is_exact(backbone) -> None:
    """Brute force: on two episodes of a two-turn game, a critic trained to its fixed point with a target network has the
    discounted returns as Q, and their mean as V of recorded actions."""
    turns = some_turns([[0.0, 1.0], [0.0, 0.0]])
    ids = turns.token_ids.clone()
    ids[1, :2] = ids[0, :2]
    turns = Turns(ids, turns.before, turns.after, turns.rewards)
    critic = critic_of(backbone)
    target = copy.deepcopy(critic).requires_grad_(False)
    optimiser = torch.optim.Adam(critic.parameters(), lr=3e-3)
    for step in range(240):
        if step == 180:
            optimiser.param_groups[0]["lr"] = 5e-4
        found = losses(critic, target, turns, 0.9, None, 0.5)
        optimiser.zero_grad()
        (found.q + found.v).sum().backward()
        optimiser.step()
        polyak_update(target, critic, 0.3)
    values = critic.values(ids, turns.before[:, :-1], turns.after)
    torch.testing.assert_close(values[0, :, :2], torch.tensor([[0.9, 0.9], [1.0, 1.0]]), atol=0.03, rtol=0)
    torch.testing.assert_close(values[1, :, :2], torch.zeros(2, 2), atol=0.03, rtol=0)
    torch.testing.assert_close(values[:, 0, 2:], torch.full((2, 2), 0.45), atol=0.03, rtol=0)


def test_values_do_not_depend_on_padding_or_on_shared_prefixes(backbone) -> None:
    """Contract: one pass gives each turn the value that it has alone, with prefixes shared or not; missing turns have 0."""
    turns = some_turns([[0.0, 0.0, 1.0], [1.0]])
    ids = turns.token_ids.clone()
    ids[1, :4] = ids[0, :4]
    plain = critic_of(backbone)
    for reader in (*plain.q, *plain.v):
        torch.nn.init.normal_(reader.linear.weight, generator=torch.Generator().manual_seed(3))
        torch.nn.init.normal_(reader.output.weight, generator=torch.Generator().manual_seed(4))
    shared = TurnCriticModel(plain.backbone, MSE, sharing_states, 0)
    shared.load_state_dict(plain.state_dict())
    whole = plain.values(ids, turns.before[:, :-1], turns.after)
    torch.testing.assert_close(shared.values(ids, turns.before[:, :-1], turns.after), whole, atol=1e-4, rtol=1e-4)
    alone = plain.values(ids[:1, :4], turns.before[:1, :1], turns.after[:1, :1])
    torch.testing.assert_close(whole[0, 0], alone[0, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole[1, 0], alone[0, 0], atol=1e-4, rtol=1e-4)
    assert bool((whole[1, 1:] == 0).all())
    assert not torch.equal(plain.q[0].hidden[0].weight, plain.q[1].hidden[0].weight)


def test_critic_init_value_model_starts_at_its_values(backbone) -> None:
    """Contract: before the first update V equals annotate's step-value model on the same histories."""
    params = HeadParams(loss="hl_gauss")
    model = StepValueModel(copy.deepcopy(backbone), params)
    torch.nn.init.normal_(model.output.weight, std=0.3, generator=torch.Generator().manual_seed(2))
    turns = some_turns([[0.0, 1.0], [0.0, 0.0]])
    expected = model.turn_values(turns.token_ids, torch.tensor([7, 7]), turns.before[:, :2])
    assert float(expected.std()) > 0.01
    critic = TurnCriticModel(model.backbone, params, predicting_states, 0, start=model)
    found = critic.values(turns.token_ids, turns.before[:, :2], turns.after)
    for twin in (2, 3):
        torch.testing.assert_close(found[..., twin], expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"rl\.critic\.head"):
        TurnCriticModel(model.backbone, MSE, predicting_states, 0, start=model)


def test_untrained_critic_predicts_its_heads_prior(backbone) -> None:
    turns = some_turns([[1.0]])
    for params, prior in ((MSE, 0.0), (HeadParams(loss="two_hot"), 0.5)):
        found = critic_of(backbone, params).values(turns.token_ids, turns.before[:, :-1], turns.after)
        torch.testing.assert_close(found, torch.full_like(found, prior))
    assert math.isclose(float(found[0, 0, 0]), 0.5, abs_tol=1e-5)
