"""B-Coder's token values, operators and losses, and the offline policy gradient, against hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.methods.b_coder import policy_loss, returns_to_go, targets, value_loss
from stages.algorithms.methods.stored_pg import policy_loss as gradient_loss
from stages.algorithms.parts.offline import OfflineBatch, Scores, ValueFit
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError
from stages.values.token_q import advantages, bounded, raw_of, target_and_best


def method(name: str = "b_coder", **settings: Any) -> Algorithm:
    return resolve(Rl(algorithm=name, settings=settings))


def offline_batch(
    rewards: list[list[float]], real: list[bool], seed: int = 0, vocabulary: int = 5
) -> tuple[OfflineBatch, Tensor]:
    """Episodes of one prompt token and one token per reward; and logits [B, T, V] of the SFT policy."""
    generator = torch.Generator().manual_seed(seed)
    count, width = len(rewards), 1 + max(map(len, rewards))
    mask, paid = torch.zeros(count, width, dtype=torch.bool), torch.zeros(count, width)
    for row, values in enumerate(rewards):
        mask[row, 1 : 1 + len(values)] = True
        paid[row, 1 : 1 + len(values)] = torch.tensor(values)
    tokens = torch.randint(0, vocabulary, (count, width), generator=generator)
    logits = torch.randn(count, width, vocabulary, generator=generator)
    logs, best = (one.view(count, width) * mask for one in target_and_best(logits.flatten(0, 1), tokens.flatten()))
    truth, length = torch.tensor(real), mask.sum(1)
    return (
        OfflineBatch(
            token_ids=tokens,
            mask=mask,
            rewards=paid,
            real=truth,
            baseline=torch.full((count,), 0.25),
            weight=1 / length / count,
            real_weight=truth / length / max(1, sum(real)),
            logprobs_ref=logs,
            best_ref=best,
            greedy=logits.argmax(-1) * mask,
        ),
        logits,
    )


def scores_of(logits: Tensor, batch: OfflineBatch, raw: Tensor | float = 1.0, residual: Tensor | float = 0.0) -> Scores:
    logs = logits.log_softmax(-1)
    nothing = torch.zeros(batch.mask.shape)
    taken, greedy = (logs.gather(-1, ids[..., None])[..., 0] * batch.mask for ids in (batch.token_ids, batch.greedy))
    return Scores(taken, logs.amax(-1) * batch.mask, greedy, nothing + raw, nothing + residual)


def test_softmax_of_q_is_the_policy_for_any_value() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    found = [target_and_best(logits, torch.tensor([token])) for token in range(3)]
    advantage = torch.cat([advantages(taken, best, 1.0) for taken, best in found])
    torch.testing.assert_close(advantage, torch.tensor([0.0, -1.0, -2.0]))
    assert float(advantage.max()) == 0.0
    for value in (5.0, -3.0):
        q = advantage + value
        torch.testing.assert_close(q.softmax(0), torch.tensor([0.6652, 0.2447, 0.0900]), atol=5e-5, rtol=0)
        torch.testing.assert_close(q.softmax(0), logits[0].softmax(0))
    torch.testing.assert_close(advantage + 5.0, torch.tensor([5.0, 4.0, 3.0]))


def test_conservative_target_is_at_most_the_optimal_target() -> None:
    """gamma 0.9, A(s') = [0, -1.5], V(s') = 0.4, a^ the second token: -0.99 instead of 0.36."""
    mask = torch.tensor([[False, True, True]])
    value, advantage = torch.tensor([[0.0, 9.0, 0.4]]), torch.tensor([[0.0, 0.0, -1.5]])
    conservative = targets(torch.zeros(1, 3), value + advantage, mask, 0.9)
    optimality = targets(torch.zeros(1, 3), value, mask, 0.9)
    assert conservative[0, 1] == pytest.approx(-0.99)
    assert optimality[0, 1] == pytest.approx(0.36)
    for seed in range(5):
        batch, _ = offline_batch([[0, 0, 1.0], [0, -0.3]], [True, False], seed)
        logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(seed + 9))
        scores = scores_of(logits, batch)
        greedy_advantage = torch.where(batch.mask, scores.greedy - scores.best, torch.zeros(()))
        lower, upper = (targets(batch.rewards, greedy_advantage * on, batch.mask, 1.0) for on in (1.0, 0.0))
        assert bool((lower <= upper).all())
        assert bool((lower < upper).any())


def test_target_of_last_token_is_its_reward() -> None:
    """Values after the episode do not matter."""
    mask = torch.tensor([[False, True, True, False], [False, True, False, False]])
    rewards = torch.tensor([[0.0, 0.0, -0.3, 0.0], [0.0, -1.0, 0.0, 0.0]])
    for value in (0.0, 7.0, -50.0):
        found = targets(rewards, torch.full((2, 4), value), mask, 0.9)
        assert found[0, 2] == pytest.approx(-0.3)
        assert found[1, 1] == -1.0
        assert found[0, 1] == pytest.approx(0.9 * value)


def test_returns_to_go_by_hand() -> None:
    """gamma 0.5; rewards 0, 1 and, after the environment's tokens, -0.3: 0.5 (1 - 0.15) = 0.425."""
    mask = torch.tensor([[True, True, False, True]])
    found = returns_to_go(torch.tensor([[0.0, 1.0, 0.0, -0.3]]), mask, 0.5)
    torch.testing.assert_close(found[mask], torch.tensor([0.425, 0.85, -0.3]))


def test_correlation_of_value_and_return() -> None:
    """As torch's from means over tokens, whatever the scale; 0 for a constant value."""
    generator = torch.Generator().manual_seed(0)
    earned = torch.randn(50, generator=generator)
    for value in (3 * earned - 1, torch.randn(50, generator=generator), torch.full((50,), 0.7)):
        means = {name: float(product.mean()) for name, product in ValueFit(value, earned).moments().items()}
        expected = torch.corrcoef(torch.stack([value, earned]))[0, 1].nan_to_num()
        assert ValueFit.correlation(means) == pytest.approx(float(expected), abs=1e-5)


def test_operator_is_a_gamma_contraction() -> None:
    """0.72 by hand; the targets of two value functions differ by at most gamma times their largest difference."""
    mask = torch.tensor([[False, True, True]])
    one, other = (targets(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, q]]), mask, 0.9) for q in (1.0, 0.2))
    assert abs(float(one[0, 1] - other[0, 1])) == pytest.approx(0.72)
    generator = torch.Generator().manual_seed(1)
    batch, logits = offline_batch([[0, 0, 1.0], [0, -0.3]], [True, False])
    scores = target_and_best(logits.flatten(0, 1), batch.greedy.flatten())
    greedy_advantage = advantages(*(one.view(2, -1) for one in scores), 1.0)
    for gamma in (0.9, 1.0):
        first, second = (torch.randn(2, 4, generator=generator) for _ in range(2))
        found = [targets(batch.rewards, value + greedy_advantage, batch.mask, gamma) for value in (first, second)]
        assert float((found[0] - found[1]).abs().max()) <= gamma * float((first - second).abs().max()) + 1e-6


def test_ground_truth_advantage_loss_is_zero_on_greedy_tokens() -> None:
    batch, logits = offline_batch([[0, 0, 1.0], [0, 0, 0]], [True, False])
    likeliest = replace(batch, token_ids=batch.greedy)
    rl = method(q_coef=0.0, beta_ce=0.0, beta_adv=1.0).rl
    assert float(policy_loss(scores_of(logits, likeliest), likeliest, rl).loss) == 0.0
    scores = scores_of(logits, batch)
    expected = float((scores.best - scores.logprobs)[0, 1:4].mean())
    assert expected > 0
    assert float(policy_loss(scores, batch, rl).loss) == pytest.approx(expected, rel=1e-5)


def test_policy_and_value_losses_agree_at_the_sft_policy() -> None:
    """With the SFT policy and residual 0 both temporal-difference losses are equal."""
    batch, logits = offline_batch([[0, 0, 1.0], [0, -0.3], [-1.0]], [True, False, False])
    raw = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(4))
    for operator in ("conservative", "optimality"):
        rl = method(gamma=0.9, operator=operator, beta_adv=0.0, beta_ce=0.0).rl
        first, then = (loss(scores_of(logits, batch, raw), batch, rl) for loss in (value_loss, policy_loss))
        assert float(first.loss) == float(then.loss)


def test_values_and_q_are_bounded() -> None:
    """And the inverse: the network's raw output for a value."""
    found = 1.0 - bounded(torch.tensor([0.0, 3.0, -3.0]), 1.0)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.8555, 0.8555]), atol=1e-4, rtol=0)
    anything = torch.linspace(-80, 80, 60_001)
    value = bounded(anything, 1.0)
    assert float(value.max()) == pytest.approx(1.0)
    assert bool((value <= 1.0).all())
    logits = torch.randn(60_001, 5, generator=torch.Generator().manual_seed(6))
    q = value + advantages(*target_and_best(logits, torch.arange(60_001) % 5), 1.0)
    assert bool((q <= 1.0).all()), "also Q, since advantages are at most 0"
    assert float(q.max()) > 0.9
    for value in (0.3, -0.6, 0.9):
        assert float(bounded(torch.tensor(raw_of(value, 1.0)), 1.0)) == pytest.approx(value, abs=1e-5)
    assert float(bounded(torch.tensor(raw_of(1.0, 1.0)), 1.0)) == pytest.approx(0.95, abs=1e-5)
    x = torch.tensor(raw_of(1.0, 1.0), requires_grad=True)
    bounded(x, 1.0).backward()
    assert abs(float(x.grad)) > 0.1, "the gradient does not vanish at the initial value"


def test_policy_loss_of_two_tokens() -> None:
    """One episode of two tokens with reward 1; gamma 1, V 0.5, A = [-1, -0.5], and -0.2 for the SFT policy's greedy second token:
    TD (-0.5 - 0.3)^2 and (0 - 1)^2."""
    batch, _ = offline_batch([[0.0, 1.0]], [True])
    best = torch.tensor([[0.0, -0.1, -0.1]])
    scores = Scores(best + torch.tensor([[0, -1, -0.5]]), best, best + torch.tensor([[0, 0, -0.2]]))
    scores = replace(scores, value=torch.full((1, 3), raw_of(0.5, 1.0)), residual=torch.zeros(1, 3))
    terms = policy_loss(scores, batch, method(beta_adv=0.1, beta_ce=0.5).rl)
    td, adv, ce = (0.64 + 1.0) / 2, (1 + 0.5) / 2, (1.1 + 0.6) / 2
    assert float(terms.loss) == pytest.approx(td + 0.1 * adv + 0.5 * ce, abs=1e-5)
    sums = {name: float(value) for name, value in terms.sums.items()}
    assert sums == pytest.approx({"loss": td + 0.1 * adv + 0.5 * ce, "td": td, "ground_truth_advantage": adv} | {
        "ground_truth_nll": ce, "value": 0.5}, abs=1e-5)  # fmt: skip


def test_ground_truth_terms_as_sums_over_tokens() -> None:
    """L_adv = sum_t |A(s*_t, a*_t)| and L_ce = -sum_t log pi(w*_t), each averaged over ground-truth programs; the TD error stays
    the mean over a program's T tokens. Ground truth of 3 and 1 tokens, and a sample of 2."""
    batch, logits = offline_batch([[0, 0, 1.0], [1.0], [0, -0.3]], [True, True, False])
    scores = scores_of(logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)), batch)
    lost, unlikely = (scores.best - scores.logprobs)[:2], -scores.logprobs[:2]
    adv, ce = float(lost.sum() / 2), float(unlikely.sum() / 2)
    means, sums = (
        {name: float(value) for name, value in policy_loss(scores, batch, method(ground_truth_terms=kind).rl).sums.items()}
        for kind in ("mean", "sum")
    )
    assert (sums["ground_truth_advantage"], sums["ground_truth_nll"]) == pytest.approx((adv, ce), rel=1e-5)
    assert means["ground_truth_nll"] == pytest.approx(float(unlikely[0].sum() / 3 + unlikely[1].sum()) / 2, rel=1e-5)
    assert sums["td"] == means["td"]
    assert sums["loss"] == pytest.approx(sums["td"] + 0.1 * adv + 0.5 * ce, rel=1e-5)
    parts = sum(float(policy_loss(scores_of(logits[rows], batch.rows(torch.tensor(rows))), batch.rows(torch.tensor(rows)),
        method(ground_truth_terms="sum").rl).loss) for rows in ([0, 2], [1]))  # fmt: skip
    whole = policy_loss(scores_of(logits, batch), batch, method(ground_truth_terms="sum").rl).loss
    assert parts == pytest.approx(float(whole), rel=1e-5)


def test_alpha_scales_advantages_in_the_td_error() -> None:
    """A = alpha (log pi - max log pi) is in the squared error: with V and rewards 0, alpha 0.1 leaves a hundredth."""
    batch, logits = offline_batch([[0.0, 0.0, 0.0]], [True])
    scores = scores_of(logits, batch, raw=0.0)
    scores = replace(scores, greedy=scores.best)
    level = {"r_max": 1e-9, "beta_adv": 0.0, "beta_ce": 0.0}
    one, tenth = (float(policy_loss(scores, batch, method(alpha=alpha, **level).rl).loss) for alpha in (1.0, 0.1))
    assert one == pytest.approx(float((scores.best - scores.logprobs)[0, 1:].square().mean()), rel=1e-5)
    assert tenth == pytest.approx(one / 100, rel=1e-4)


def test_limits_are_sft_dqn_and_equal_operators() -> None:
    """q_coef and beta_adv 0: SFT on the ground truth; betas 0 with operator optimality: dueling DQN, whose target has the largest
    Q; with the policy's own greedy token as a^ both operators agree."""
    batch, logits = offline_batch([[0, 0, 1.0], [0, -0.3]], [True, False])
    moved = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(8))
    scores = scores_of(moved, batch)
    sft = policy_loss(scores, batch, method(q_coef=0.0, beta_adv=0.0, beta_ce=1.0).rl).loss
    assert float(sft) == pytest.approx(float(-scores.logprobs[0, 1:4].mean()), rel=1e-5)
    dqn = policy_loss(scores, batch, method(operator="optimality", beta_adv=0.0, beta_ce=0.0).rl).loss
    q = moved - moved.amax(-1, keepdim=True) + bounded(torch.tensor(1.0), 1.0)
    total = 0.0
    for row, length in enumerate((3, 2)):
        for place in range(1, 1 + length):
            end = place == length
            target = float(batch.rewards[row, place]) + (0.0 if end else float(q[row, place + 1].max()))
            total += (float(q[row, place, batch.token_ids[row, place]]) - target) ** 2 / length / 2
    assert float(dqn) == pytest.approx(total, rel=1e-5)
    own = replace(batch, greedy=moved.argmax(-1) * batch.mask)
    same = [
        float(policy_loss(scores_of(moved, own), own, method(operator=operator).rl).loss)
        for operator in ("conservative", "optimality")
    ]
    assert same[0] == same[1]
    different = float(policy_loss(scores, batch, method().rl).loss)
    assert different != same[0]


def test_gradient_matches_finite_differences() -> None:
    """Targets are constants: the successor's Q has no gradient, the taken token's and the residual's have."""
    batch, logits = offline_batch([[0, 0, 1.0], [0, -0.3]], [True, False])
    rl = method(gamma=0.9).rl
    start = torch.cat([logits + 0.3, torch.full((2, 4, 1), 0.2)], -1).double()  # the residual comes last
    fixed = scores_of(start[..., :5], batch, 1.0, start[..., 5])
    value = bounded(fixed.value + fixed.residual, 1.0)
    target = targets(batch.rewards, value + fixed.greedy - fixed.best, batch.mask, 0.9)

    def loss(packed: Tensor) -> Tensor:
        now = scores_of(packed[..., :5], batch, 1.0, packed[..., 5])
        taken = now.logprobs - now.best + bounded(now.value + now.residual, 1.0)
        per_token = (taken - target) ** 2
        real = torch.where(batch.mask, 0.1 * (now.logprobs - now.best).abs() - 0.5 * now.logprobs, torch.zeros(()))
        summed = (torch.where(batch.mask, per_token, torch.zeros(())).sum(1) * batch.weight).sum()
        return summed + (real.sum(1) * batch.real_weight).sum()

    packed = start.clone().requires_grad_()
    found = policy_loss(scores_of(packed[..., :5], batch, 1.0, packed[..., 5]), batch, rl).loss
    assert float(found.detach()) == pytest.approx(float(loss(start)), rel=1e-6)
    (gradient,) = torch.autograd.grad(found, packed)
    for place in ((0, 1, 0), (0, 3, 2), (1, 2, 4), (0, 2, 5), (1, 1, 5)):
        step = torch.zeros_like(start)
        step[place] = 1e-5
        numeric = float(loss(start + step) - loss(start - step)) / 2e-5
        assert float(gradient[place]) == pytest.approx(numeric, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", ["b_coder", "stored_pg"])
def test_loss_does_not_depend_on_micro_batch_split(name: str) -> None:
    """Contract: losses of micro-batches sum to the whole; padding and prompt have no effect."""
    batch, logits = offline_batch([[0, 0, 1.0], [0, -0.3], [-1.0]], [True, False, False])
    loss = policy_loss if name == "b_coder" else gradient_loss
    rl, moved = method(name).rl, logits + 0.2 * torch.arange(5.0)
    whole = float(loss(scores_of(moved, batch), batch, rl).loss)
    parts = 0.0
    for rows in ([2, 0], [1]):
        some = batch.take(rows)
        parts += float(loss(scores_of(moved[rows, : some.mask.shape[1]], some), some, rl).loss)
    assert parts == pytest.approx(whole, rel=1e-5)
    strange = torch.where(batch.mask[..., None], moved, torch.full_like(moved, 3.0))
    assert float(loss(scores_of(strange, batch), batch, rl).loss) == pytest.approx(whole, rel=1e-6)


def test_offline_policy_gradient_matches_reinforce() -> None:
    """A = R - baseline; at the SFT policy the clipped surrogate has REINFORCE's gradient; with R = baseline only the ground-truth
    NLL remains."""
    batch, logits = offline_batch([[0, 0, 1.0], [0, -0.3]], [True, False])
    gradients = []
    for clip in (0.2, None):
        packed = logits.clone().requires_grad_()
        terms = gradient_loss(scores_of(packed, batch), batch, method("stored_pg", clip=clip, beta_ce=0.0).rl)
        gradients.append(torch.autograd.grad(terms.loss, packed)[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    plain = gradient_loss(scores_of(logits, batch), batch, method("stored_pg", clip=None, beta_ce=0.0).rl).loss
    expected = -(0.75 * batch.logprobs_ref[0].sum() / 3 - 0.55 * batch.logprobs_ref[1].sum() / 2) / 2
    assert float(plain) == pytest.approx(float(expected), rel=1e-5)
    level = replace(batch, baseline=batch.returns)
    only = gradient_loss(scores_of(logits, level), level, method("stored_pg", beta_ce=1.0).rl).loss
    assert float(only) == pytest.approx(float(-batch.logprobs_ref[0].sum() / 3), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"settings": {"value_steps": 20}}, "leaves none of rl.steps"),
        ({"steps": 1}, "rl.steps to at least 2"),
        ({"settings": {"q_coef": 0, "beta_adv": 0, "beta_ce": 0}}, "there is no loss"),
        ({"settings": {"real_share": 0.0}}, "apply to ground truth"),
        ({"settings": {"real_share": 0.8, "other_share": 0.3}}, "sum to more than 1"),
        ({"settings": {"gamma": 0.0}}, r"'rl\.settings\.gamma' Input should be greater than 0"),
        ({"loss": {"entropy_coef": 0.1}}, "learns from an offline dataset"),
        ({"critic": {"learning_rate": 0.1}}, "learns from an offline dataset"),
        ({"preference": {"beta": 0.1}}, "such as dpo"),
        ({"environment_steps": 100}, "plays no episodes"),
        ({"stop_at_success": 0.5}, "plays no episodes"),
    ],
    ids=str,
)
def test_conflicting_settings_are_rejected(values: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate({"algorithm": "b_coder", **values}))


def test_value_network_gets_9_of_14_steps() -> None:
    """As in the paper; both networks get at least one step."""
    assert [resolve(Rl(algorithm="b_coder", steps=steps)).rl.settings.value_steps for steps in (2, 3, 28)] == [1, 2, 18]
    assert method(value_steps=4).rl.settings.value_steps == 4
