"""ARSQ: codes and soft advantages by hand, what conditioning is worth, refusals by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError
from torch import Tensor

from stages.control.off_policy.updates import FlatAdam
from stages.control.soft_q import joint_actions
from stages.control.soft_q.arsq import SoftQ, decode, demo_term, encode, normalised, prefixes, sequence
from stages.control.soft_q.joint_actions import REWARDS, SHARES, dataset, reward_of, run
from stages.control.soft_q.settings import DemoTerm, JointActions

JOINT = torch.tensor([[1.0, -1.0], [0.1, -10.0]])
"""Q of two dimensions with two bins each."""


@pytest.mark.parametrize(
    ("action", "levels", "bins", "codes", "centre"),
    [
        (0.3, 2, 2, [1, 0], 0.25),
        (0.3, 2, 7, [4, 3], 0.2857),
        (0.3, 1, 41, [26], 0.29268),
        (1.0, 2, 7, [6, 6], 0.97959),
        (-1.0, 1, 4, [0], -0.75),
    ],
)
def test_codes_of_one_number(action: float, levels: int, bins: int, codes: list[int], centre: float) -> None:
    found = encode(torch.tensor([[action]]), levels, bins)
    assert found.tolist() == [codes]
    assert decode(found, 1, bins).item() == pytest.approx(centre, abs=1e-4)


@pytest.mark.parametrize(("levels", "bins"), [(2, 7), (1, 41), (3, 5)])
def test_decoding_errs_by_at_most_half_a_bin(levels: int, bins: int) -> None:
    action = torch.rand(500, 3, generator=torch.Generator().manual_seed(1)) * 2 - 1
    error = (decode(encode(action, levels, bins), 3, bins) - action).abs().max()
    assert float(error) <= bins**-levels + 1e-6


def test_prefixes_are_the_centres_so_far() -> None:
    """Two dimensions and levels: all of level 1 come before level 2."""
    found = prefixes(torch.tensor([[1, 0, 1, 1]]), 2, 2, [0, 1, 2, 3])[0]
    assert found.tolist() == [[0.0, 0.0], [0.5, 0.0], [0.5, -0.5], [0.75, -0.5]]


@pytest.mark.parametrize(
    ("order", "first", "positions", "expected"),
    [
        ("level_major", "first", [0, 1, 2, 3], [[0.0, 0.0], [0.5, 0.0], [0.5, -0.5], [0.75, -0.5]]),
        ("level_major", "last", [1, 0, 3, 2], [[0.0, -0.5], [0.0, 0.0], [0.5, -0.25], [0.5, -0.5]]),
        ("dimension_major", "first", [0, 2, 1, 3], [[0.0, 0.0], [0.75, 0.0], [0.5, 0.0], [0.75, -0.5]]),
        ("dimension_major", "last", [1, 3, 0, 2], [[0.0, -0.25], [0.0, 0.0], [0.5, -0.25], [0.0, -0.5]]),
    ],
)
def test_prefixes_in_other_orders(order: str, first: str, positions: list[int], expected: list[list[float]]) -> None:
    """Of two dimensions, levels and bins, the action's parts being 0.75 and -0.25: each position sees what was chosen before."""
    found = sequence(2, 2, order, first)
    assert found == positions
    assert prefixes(torch.tensor([[1, 0, 1, 1]]), 2, 2, found)[0].tolist() == expected


@pytest.mark.parametrize("order", ["level_major", "dimension_major"])
@pytest.mark.parametrize("first", ["first", "last"])
def test_in_every_order_v_is_the_soft_maximum_and_actions_are_its_policys(order: str, first: str) -> None:
    """Greedy actions follow the conditional probabilities: of 16 actions, that of a network that puts all on one."""
    torch.manual_seed(0)
    settings = JointActions.model_validate(
        {"levels": 2, "bins": 2, "alpha": 0.5, "width": 8, "order": order, "first_dimension": first}
    )
    model, two = SoftQ(1, 2, settings), torch.arange(2)
    with torch.no_grad():
        model.heads.weights[-1].mul_(300.0)
        codes = torch.cartesian_prod(two, two, two, two)
        found, advantages = model(torch.ones(16, 1), codes)
        value = model.state_value(torch.ones(1, 1))[:, 0, 0]
        for position in model.order:  # keep the codes that have the best bin after what they chose before
            best = codes[:, position] == advantages[:, :, position].amin(0).argmax(-1)
            codes, advantages = codes[best], advantages[:, best]
    assert torch.allclose(0.5 * (found / 0.5).logsumexp(1), value, atol=1e-4)
    assert torch.equal(model.act(torch.ones(1, 1)), decode(codes, 2, 2))


def test_orthogonal_first_weights() -> None:
    """Hidden layers' rows or columns have squared length 2 and are orthogonal; the last layer's have 0.01^2; biases are 0."""
    torch.manual_seed(0)
    model = SoftQ(3, 2, JointActions(width=8, bins=5, first_weights="orthogonal", activation="tanh"))
    for network in (model.state_value, model.heads):
        for weights, gain in zip(network.weights, (2.0, 2.0, 1e-4), strict=True):
            for member in weights.detach():
                gram = member @ member.T if member.shape[0] <= member.shape[1] else member.T @ member
                assert torch.allclose(gram, gain * torch.eye(len(gram)), atol=1e-5)
        assert all(not biases.detach().any() for biases in network.biases)
    assert not torch.equal(model.heads.weights[0][0], model.heads.weights[0][1])


def test_one_dimension_is_learnt_alike_with_and_without_conditioning() -> None:
    """To the bit: there is nothing before the only choice."""
    states, codes, rewards = torch.ones(6, 1), torch.arange(6)[:, None] % 3, torch.arange(6.0)
    found = []
    for condition in ("prefix", "none"):
        torch.manual_seed(0)
        model = SoftQ(1, 1, JointActions.model_validate({"bins": 3, "width": 8, "condition": condition}))
        optimiser = FlatAdam(model.parameters(), learning_rate=1e-2)
        for _ in range(20):
            optimiser.descend((model(states, codes)[0] - rewards).square().mean())
        found.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*found)


def test_actions_on_a_ring() -> None:
    """Good between the radii 0.5 and 0.9; half of the data are there in all directions, the rest with their area's share."""
    actions = torch.tensor([[0.0, 0.0], [0.3, 0.4], [-0.6, 0.6], [0.7, -0.7], [-0.9, 0.0]])
    assert reward_of(actions, "ring").tolist() == [-1.0, 1.0, 1.0, -1.0, 1.0]
    action, reward = dataset(JointActions(rewards="ring", data=40_000))
    assert float((reward_of(action, "ring") > 0).float().mean()) == pytest.approx(0.5 + 0.5 * math.pi * 0.56 / 4, abs=0.01)
    assert action.mean(0).abs().max() < 0.02
    assert float((reward - reward_of(action, "ring")).std()) == pytest.approx(0.5, rel=0.05)


def test_the_ring_is_found_by_values_and_not_by_a_clone() -> None:
    """The clone's middle action is the data's mean, in the bad centre."""
    assert run(JointActions(rewards="ring", updates=400))["greedy_reward"] == 1.0
    assert run(JointActions(rewards="ring", learner="bc", updates=200))["greedy_reward"] == -1.0


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0])
def test_advantages_are_log_probabilities(alpha: float) -> None:
    raw = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    found = normalised(raw, alpha)
    assert torch.allclose((found / alpha).exp().sum(-1), torch.ones(4), atol=1e-5)
    assert torch.allclose(normalised(raw + 3.0, alpha), found, atol=1e-5)
    assert (found <= 0).all()
    assert normalised(torch.zeros(2), 1.0).tolist() == pytest.approx([-0.6931, -0.6931], abs=1e-4)


def decomposed(alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """V, A_1 [2] and A_2 [2, 2] of JOINT."""
    soft = alpha * (JOINT / alpha).logsumexp(-1)
    return alpha * (JOINT / alpha).flatten().logsumexp(0), normalised(soft, alpha), normalised(JOINT, alpha)


def test_two_binary_dimensions_by_hand() -> None:
    value, first, second = decomposed(1.0)
    assert value.item() == pytest.approx(1.43303, abs=1e-4)
    assert first.tolist() == pytest.approx([-0.3061, -1.3330], abs=1e-4)
    assert second.flatten().tolist() == pytest.approx([-0.1269, -2.1269, -4e-5, -10.10], abs=1e-3)
    assert torch.allclose(value + first[:, None] + second, JOINT, atol=1e-3)
    value, first, _ = decomposed(0.1)
    assert value.item() == pytest.approx(1.0000123, abs=1e-6)
    assert first.tolist() == pytest.approx([-1.23e-5, -0.90001], abs=1e-5)


def test_cold_values_are_the_largest() -> None:
    assert decomposed(1e-4)[0].item() == pytest.approx(1.0, abs=1e-3)


def test_q_is_at_most_v_and_its_soft_maximum() -> None:
    """Over all pairs of bins, alpha logsumexp Q / alpha is V, in both networks."""
    torch.manual_seed(0)
    model = SoftQ(1, 2, JointActions(bins=3, alpha=0.5, width=8))
    codes, state = torch.cartesian_prod(torch.arange(3), torch.arange(3)), torch.ones(9, 1)
    with torch.no_grad():
        found, _ = model(state, codes)
        value = model.state_value(state[:1])[:, 0, 0]
    assert (found <= value[:, None] + 1e-6).all()
    assert torch.allclose(0.5 * (found / 0.5).logsumexp(1), value, atol=1e-5)


def test_a_later_choice_sees_earlier_ones_only_if_conditioned() -> None:
    state, codes = torch.ones(2, 1), torch.tensor([[0, 1], [2, 1]])
    for condition, equal in (("prefix", False), ("none", True)):
        torch.manual_seed(0)
        model = SoftQ(1, 2, JointActions.model_validate({"bins": 3, "width": 8, "condition": condition}))
        found = model.advantages(state, codes).detach()
        assert torch.allclose(found[:, 0, 0], found[:, 1, 0])
        assert torch.allclose(found[:, 0, 1], found[:, 1, 1]) is equal


@pytest.mark.parametrize(
    ("values", "advantages", "expected"),
    [
        ({"kind": "logsumexp"}, [-0.6931, -0.6931], 0.0),
        ({"kind": "logsumexp"}, [-0.2, -1.0], -0.8),
        ({"kind": "logsumexp"}, [-0.1, -3.0], -1.0),
        ({"kind": "logsumexp", "least": -5.0}, [-0.1, -3.0], -2.9),
        ({"kind": "logsumexp"}, [-2.0, -0.5, -0.5], 1.5 + math.log(2)),
        ({"kind": "margin"}, [-2.0, -0.5, -1.0], (1.5 + 1.0) / 2),
        ({"kind": "margin"}, [-0.1, -3.0, -0.2], (-1.0 - 0.1) / 2),
        ({"kind": "none"}, [-2.0, -0.5], 0.0),
    ],
)
def test_demo_terms_by_hand(values: dict[str, object], advantages: list[float], expected: float) -> None:
    """The data's bin is the first."""
    found = demo_term(torch.tensor([[advantages]]), torch.tensor([[0]]), DemoTerm.model_validate(values))
    assert found.tolist() == pytest.approx([expected], abs=1e-5)


def test_demo_terms_are_summed_over_positions() -> None:
    """Of two networks and one row: -0.8 and 0.5."""
    advantages = torch.tensor([[[[-0.2, -1.0], [-1.0, -0.5]]]]).expand(2, -1, -1, -1)
    found = demo_term(advantages, torch.tensor([[0, 0]]), DemoTerm(kind="logsumexp"))
    assert found.flatten().tolist() == pytest.approx([-0.3, -0.3])


def test_the_best_sum_of_one_value_per_part_is_at_another_pair() -> None:
    """Weighted least squares of the problem's table, by normal equations."""
    design = torch.tensor([[1.0, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1]])
    weight = SHARES.flatten().sqrt()
    fitted = design @ torch.linalg.pinv(design * weight[:, None]) @ (REWARDS.flatten() * weight)
    assert int(fitted.argmax()) == 2
    assert int(REWARDS.argmax()) == 0


def test_the_data_are_as_described() -> None:
    action, reward = dataset(JointActions(data=20_000))
    sign = (action > 0).long()
    share = torch.bincount(sign[:, 0] * 2 + sign[:, 1], minlength=4) / len(action)
    assert share.tolist() == pytest.approx(SHARES.flatten().tolist(), abs=0.02)
    assert float((reward - reward_of(action)).std()) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(("condition", "greedy"), [("prefix", 1.0), ("none", 0.0)])
def test_conditioning_finds_the_best_pair(condition: str, greedy: float) -> None:
    figures = run(JointActions.model_validate({"condition": condition, "seed": 1}))
    assert figures["greedy_reward"] == greedy
    assert figures["soft_reward"] == pytest.approx(greedy, abs=0.1)
    assert (figures["value_error"] < 0.25) == (condition == "prefix")


def fitted(condition: str, actions: Tensor, rewards: Tensor) -> SoftQ:
    """Q of choices among two bins [B, D], by squared error."""
    torch.manual_seed(0)
    model = SoftQ(1, actions.shape[1], JointActions.model_validate({"bins": 2, "width": 32, "condition": condition}))
    optimiser = FlatAdam(model.parameters(), learning_rate=5e-3)
    for _ in range(400):
        optimiser.descend((model(torch.ones(len(actions), 1), actions)[0] - rewards).square().mean())
    return model


def chosen(model: SoftQ) -> list[int]:
    """The bins of the greedy action."""
    return encode(model.act(torch.ones(1, 1)), 1, 2)[0].tolist()


def test_values_of_one_dimension_alone_mislead_where_data_have_several_modes() -> None:
    """The paper's case: (0, 0) gives 1 and is a fifth of the data, (0, 1) gives -1 and (1, 0) 0.1, two fifths each. Of each
    dimension alone, values are the data's means Q_1 = (-1/3, 0.1) and Q_2 = (0.4, -1), which choose (1, 0)."""
    actions = torch.tensor([[0, 0], [0, 1], [0, 1], [1, 0], [1, 0]])
    rewards = torch.tensor([1.0, -1.0, -1.0, 0.1, 0.1])
    alone = [fitted("none", actions[:, [place]], rewards) for place in range(2)]
    for model, expected in zip(alone, ([-1 / 3, 0.1], [0.4, -1.0]), strict=True):
        values = model(torch.ones(2, 1), torch.tensor([[0], [1]]))[0]
        assert torch.allclose(values, torch.tensor(expected).expand(2, -1), atol=0.02)
    assert [chosen(model)[0] for model in alone] == [1, 0]
    both = fitted("prefix", actions, rewards)
    assert torch.allclose(both(torch.ones(5, 1), actions)[0], rewards.expand(2, -1), atol=0.02)
    assert chosen(both) == [0, 0]


def test_the_least_advantage_is_a_figure() -> None:
    """Over both networks, all bins, and all choices before the second dimension's; the smaller of two is at most -alpha log 2."""
    settings = JointActions(bins=2, updates=200)
    model = joint_actions.learn(settings)
    every = torch.tensor([[0, 0], [1, 0]])
    least = min(model.advantages(torch.ones(2, 1), every).flatten().tolist())
    assert run(settings)["least_advantage"] == pytest.approx(least)
    assert least <= -0.05 * math.log(2)


def test_demonstrations_hold_the_policy_near_the_data() -> None:
    """A heavy term makes it imitate the most frequent pair, the worst one."""
    assert run(JointActions(demo=DemoTerm(kind="logsumexp", weight=20.0), updates=300))["greedy_reward"] < 1.0


def test_rivals_learn_from_the_same_data() -> None:
    """Soft actor-critic finds the best pair; the mean of the data's actions is at none of its pairs' centres."""
    sac = run(JointActions(learner="sac", seed=1, updates=400))
    assert sac["greedy_reward"] == 1.0
    assert sac["value_error"] < 0.25
    clone = run(JointActions(learner="bc", seed=1, updates=200))
    assert set(clone) == {"greedy_reward", "soft_reward"}
    assert clone["soft_reward"] < 0.3  # the data's mean reward is -0.25


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    settings.write_text(yaml.safe_dump({"updates": 20, "seed": 3}))
    monkeypatch.setattr("sys.argv", ["joint_actions", "--settings", str(settings), "--result", str(result)])
    assert joint_actions.main() == 0
    expected = {f"control.{name}": value for name, value in run(JointActions(updates=20, seed=3)).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"demo": {"weight": 2.0}}, "weight has no effect with kind: none"),
        ({"demo": {"kind": "margin", "temperature": 2.0}}, "temperature has no effect with kind: margin"),
        ({"learner": "sac", "condition": "none"}, "condition has no effect: it needs learner: arsq"),
        ({"learner": "bc", "alpha": 0.1}, "alpha has no effect: it needs learner: arsq or sac"),
        ({"condition": "suffix"}, "Input should be 'prefix' or 'none'"),
        ({"order": "random"}, "Input should be 'level_major' or 'dimension_major'"),
        ({"order": "dimension_major"}, "order has no effect: it needs two levels or more"),
        ({"learner": "bc", "noise": 1.0}, "noise has no effect: it needs learner: arsq or sac"),
        ({"learner": "sac", "weight_decay": 0.1}, "weight_decay has no effect: it needs learner: arsq"),
        ({"bellman_weight": -1.0}, "greater than or equal to 0"),
        ({"bins": 1}, "greater than or equal to 2"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        JointActions.model_validate(values)
