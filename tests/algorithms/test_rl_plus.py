"""RL-PLUS: multiple importance sampling of external tokens, exploration weights, groups with a demonstration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.external import External, exploration, external_loss, ratio
from stages.algorithms.parts.loss import denominators
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError

MIS = External(per_group=1, loss="mis", mix=0.5, u=1.0, gamma=0.5)


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def plus(size: int = 8, **changes) -> Rl:
    return Rl.model_validate({"algorithm": "rl_plus", "group_size": size, **changes})


def with_external(batch: TrajectoryBatch, *rows: int) -> TrajectoryBatch:
    """Marks rows as external; logprobs_old are the training policy's log-probs of their tokens."""
    external = batch.mask & torch.zeros(batch.size, 1, dtype=torch.bool).index_fill(0, torch.tensor(rows), True)
    return batch.with_(external=external)


def loss_of(rl: Rl, batch: TrajectoryBatch, shift: float = 0.0) -> tuple[float, Tensor]:
    """The loss at log-probs `shift` above the old ones, and its gradient."""
    algorithm = resolve(rl, 8)
    batch = algorithm.prepare(batch)
    logprobs = ((batch.logprobs_old + shift) * batch.mask).requires_grad_()
    terms = algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    return float(terms.loss.detach()), gradient


def test_mis_ratio() -> None:
    """p = p_old, U = 1."""
    p = logs(0.01, 0.1, 0.25, 0.5, 0.9, 1.0)
    expected = torch.tensor([0.03883, 0.30769, 0.57143, 0.8, 0.97297, 1.0], dtype=torch.float64)
    torch.testing.assert_close(ratio(p, p, MIS), expected, rtol=0, atol=5e-6)


def test_mis_ratio_times_exploration_weight() -> None:
    """gamma 0.5; gamma 0 leaves the ratio unchanged."""
    p = logs(0.5, 0.25, 0.9, 1.0)
    expected = torch.tensor([0.56569, 0.49487, 0.30768, 0.0], dtype=torch.float64)
    torch.testing.assert_close(ratio(p, p, MIS) * exploration(p, 0.5), expected, rtol=0, atol=5e-6)
    assert exploration(p, 0.0).tolist() == [1.0] * 4


def test_mis_ratio_is_bounded() -> None:
    """At most 4 for U = 1, where p / p_old is unbounded; `ratio_max` lowers the bound."""
    assert float(ratio(logs(1.0), torch.tensor([-200.0], dtype=torch.float64), MIS)) == pytest.approx(4.0)
    assert float(ratio(logs(1.0), logs(0.1), MIS)) == pytest.approx(3.0769, abs=5e-5)
    old = External(per_group=1, loss="old")
    assert float(ratio(logs(1.0), logs(0.1), old)) == pytest.approx(10.0)
    assert float(ratio(logs(1.0), logs(0.1), old.model_copy(update={"ratio_max": 2.5}))) == 2.5
    assert float(ratio(logs(0.3), logs(0.1), External(per_group=1, loss="pi"))) == pytest.approx(0.3)


def test_mis_ratio_with_uniform_over_the_vocabulary() -> None:
    """U = 1/100 gives other ratios than U = 1."""
    p, expected = logs(0.01, 0.1, 0.5), torch.tensor([1.0, 1.29032, 1.3245], dtype=torch.float64)
    torch.testing.assert_close(ratio(p, p, MIS.model_copy(update={"u": 0.01})), expected, rtol=0, atol=5e-6)
    vocabulary = MIS.model_copy(update={"u": "vocabulary"})
    torch.testing.assert_close(ratio(p, p, vocabulary, 100), expected, rtol=0, atol=5e-6)
    with pytest.raises(ValueError, match="size of the policy's vocabulary"):
        ratio(p, p, vocabulary)


@pytest.mark.parametrize(("own", "expected"), [(0.0, [0.875] + [-0.125] * 7), (1.0, [0.75, 0.75] + [-0.25] * 6)])
def test_demonstration_counts_in_the_baseline(make_batch, own: float, expected: list[float]) -> None:
    """Only the external row succeeds; the external row and one own row succeed."""
    batch = resolve(plus(), 8).prepare(with_external(make_batch([[1, own, 0, 0, 0, 0, 0, 0]]), 0))
    assert batch.advantages is not None
    assert batch.advantages[:, 1].tolist() == expected


def test_without_demonstrations_equals_grpo_without_std_and_clip(make_batch) -> None:
    """per_group 0, and a batch without external rows; nothing is NaN."""
    batch = make_batch([[1, 0, 0], [1, 1, 0]], lengths=[2, 3, 4, 1, 2, 3])
    grpo = Rl(
        algorithm="grpo",
        group_size=3,
        advantage={"std": "none"},
        loss={"kind": "importance", "aggregation": "constant", "entropy_coef": 0.001, "entropy_aggregation": "token_mean"},
    )
    expected, expected_gradient = loss_of(grpo, batch, 0.2)
    for rl in (plus(3, external={"per_group": 0}), plus(3)):
        loss, gradient = loss_of(rl, batch, 0.2)
        assert loss == expected
        assert torch.equal(gradient, expected_gradient)
    none = batch.with_(external=torch.zeros_like(batch.mask))
    loss, gradient = loss_of(plus(3), none, 0.2)
    assert (loss, gradient.isfinite().all().item()) == (expected, True)


def test_entropy_bonus_aggregation(make_batch) -> None:
    """0.001 times the tokens' mean entropy, whatever the loss is divided by; with entropy_aggregation: loss it is divided like
    the loss."""
    batch = make_batch([[1, 0, 0]], lengths=[2, 3, 4])
    weights = {}
    for how in ("token_mean", "loss"):
        algorithm = resolve(plus(3, external={"per_group": 0}, loss={"entropy_aggregation": how}))
        prepared = algorithm.prepare(batch)
        entropy = torch.full(prepared.mask.shape, 0.7, requires_grad=True)
        loss = algorithm.loss(prepared.logprobs_old, entropy, prepared, denominators(prepared, 8.0)).loss
        (gradient,) = torch.autograd.grad(loss, entropy)
        assert not gradient[~prepared.mask].any()
        weights[how] = gradient[prepared.mask]
    torch.testing.assert_close(weights["token_mean"], torch.full((9,), -0.001 / 9))
    torch.testing.assert_close(weights["loss"], torch.full((9,), -0.001 / (3 * 8)))


def test_exploration_weight_has_no_gradient() -> None:
    """dloss/dlogp = -A C r by finite differences with C constant; at p = p_old it is -A 4p/(3p+1) sqrt(1-p)."""
    mask = torch.tensor([[False, True, True, True]])
    p, old, advantage, eps = logs(1.0, 0.2, 0.5, 0.9)[None], logs(1.0, 0.3, 0.5, 0.6)[None], 0.75, 1e-6
    batch = TrajectoryBatch(
        *(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([4]), mask, mask.long() - 1, old, torch.zeros(1, dtype=torch.int64)),
        *(torch.ones(1), torch.ones(1, 1), torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)),
        external=mask,
        advantages=advantage * mask.double(),
    )
    logprobs = p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(external_loss(logprobs, batch, MIS).sum(), logprobs)
    held = exploration(p, 0.5)
    for column in range(1, 4):
        up, down = (p.clone() for _ in range(2))
        up[0, column] += eps
        down[0, column] -= eps
        numeric = -(advantage * held * (ratio(up, old, MIS) - ratio(down, old, MIS)))[0, column] / (2 * eps)
        assert float(gradient[0, column]) == pytest.approx(float(numeric), rel=1e-6)
        assert float(gradient[0, column]) == pytest.approx(-float((advantage * held * ratio(p, old, MIS))[0, column]))
    on = p[0, 2].exp().item()
    assert float(gradient[0, 2]) == pytest.approx(-advantage * (4 * on / (3 * on + 1)) * math.sqrt(1 - on))
    assert float(gradient[0, 0]) == 0


def test_external_and_own_tokens_have_different_losses(make_batch) -> None:
    """Marking a sample as external changes the loss, unless p = p_old = 1 and gamma = 0."""
    batch = make_batch([[1, 0, 0]])
    for rl in (plus(3), plus(3, external={"gamma": 0.0})):
        assert loss_of(rl, with_external(batch, 0))[0] != pytest.approx(loss_of(rl, batch)[0], rel=1e-3)
    certain = batch.with_(logprobs_old=torch.zeros(batch.mask.shape))
    same = plus(3, external={"gamma": 0.0})
    assert loss_of(same, with_external(certain, 0))[0] == pytest.approx(loss_of(same, certain)[0], rel=1e-6)
    assert loss_of(plus(3), with_external(certain, 0))[0] != pytest.approx(loss_of(plus(3), certain)[0], rel=1e-3)


def test_loss_matches_plain_python(make_batch) -> None:
    """Token by token: one external row of 2 tokens, own rows of 3 and 1."""
    batch = with_external(make_batch([[1, 0, 1]], lengths=[2, 3, 1]), 0)
    shift, length, total = 0.1, 8, 0.0
    mean = 2 / 3
    for row, reward in enumerate([1.0, 0.0, 1.0]):
        for old in batch.logprobs_old[row][batch.mask[row]].tolist():
            p, before = math.exp(old + shift), math.exp(old)
            if row == 0:
                weight = math.sqrt(max(0.0, 1 - p))
                total -= (reward - mean) * weight * 2 * p / (0.5 * before + 0.5 + before)
            else:
                total -= (reward - mean) * p / before
    assert loss_of(plus(3), batch, shift)[0] == pytest.approx(total / (3 * length), rel=1e-5)


def test_sft_loss_on_demonstrations_ignores_advantages(make_batch) -> None:
    """external.loss: sft is -log p on external tokens whatever the advantage; such groups stay in the forward pass."""
    batch = with_external(make_batch([[1, 1, 1]], lengths=[2, 2, 2]), 0)
    rl = plus(3, external={"loss": "sft", "coef": 0.5, "gamma": None}, loss={"entropy_coef": 0.0})
    _, gradient = loss_of(rl.model_copy(update={"external": External(loss="sft", coef=0.5)}), batch)
    assert gradient[batch.external].tolist() == pytest.approx([-0.5 / 24] * 2)
    assert gradient[~batch.external].abs().sum() == 0
    algorithm = resolve(rl, 8)
    assert algorithm.forward_rows(algorithm.prepare(batch)).tolist() == [0, 1, 2]
    scored = resolve(plus(3, loss={"entropy_coef": 0.0}), 8)
    assert scored.forward_rows(scored.prepare(batch)).tolist() == []


def test_statistics_and_kl_exclude_external_tokens(make_batch) -> None:
    batch = with_external(make_batch([[1, 0]], lengths=[2, 3]), 0)
    batch = batch.with_(logprobs_ref=batch.logprobs_old - 0.5 * batch.mask)
    algorithm = resolve(plus(2, loss={"kl_coef": 0.1}, reward={"kl_coef": 0.2}), 8)
    prepared = algorithm.prepare(batch)
    assert prepared.token_rewards is not None
    assert prepared.token_rewards[0].abs().sum() == 0
    assert prepared.token_rewards[1].abs().sum() > 0
    terms = algorithm.loss(batch.logprobs_old, torch.ones(batch.mask.shape), prepared, denominators(prepared, 8.0))
    assert (float(terms.sums["tokens"]), float(terms.sums["entropy"]), float(terms.sums["external_tokens"])) == (3, 3, 2)
    without = resolve(plus(2, reward={"kl_coef": 0.2}), 8).loss(
        batch.logprobs_old, torch.ones(batch.mask.shape), prepared, denominators(prepared, 8.0)
    )
    kl = 3 * (math.exp(-0.5) - 1 + 0.5)
    assert float(terms.loss - without.loss) == pytest.approx(0.1 * kl / 16, rel=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "rl_plus", "group_size": 1}, "group_size"),
        ({"algorithm": "rl_plus", "group_size": 4, "external": {"per_group": 4}}, "lower per_group, or raise group_size"),
        ({"algorithm": "grpo", "external": {"gamma": 0.5}}, "per_group above 0"),
        ({"algorithm": "rl_plus", "external": {"loss": "sft", "gamma": 0.5}}, "mis, pi or old"),
        ({"algorithm": "rl_plus", "external": {"loss": "pi", "u": 1.0}}, "external.loss: mis"),
        ({"algorithm": "rl_plus", "external": {"coef": 2.0}}, "external.loss: sft"),
        ({"algorithm": "ppo", "external": {"per_group": 1}}, "another policy"),
        ({"algorithm": "dpo", "external": {"per_group": 1}}, "preference pairs"),
        ({"algorithm": "pacs", "external": {"per_group": 1}}, "set it to 0"),
    ],
)
def test_conflicting_settings_are_rejected(values: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate(values))
