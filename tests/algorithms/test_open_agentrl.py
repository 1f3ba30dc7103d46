"""GRPO-T, GRPO-TCR and GRPO-SCR against the paper's worked example. Task buckets: tests/curation/test_model_aware.py."""

from __future__ import annotations

import math

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.loss import Loss, clipped, denominators, gspo, ppo_clip
from stages.algorithms.parts.reward import Reward, shape_rewards
from stages.algorithms.parts.shaping import overlong_term
from stages.algorithms.settings import Rl
from stages.evaluation.statistics import maj_at_k, pass_at_k

MAX_LENGTH = 20480


@pytest.mark.parametrize(("calls", "wrong"), [(0, -1.0), (1, -0.9), (2, -0.8), (4, -0.6), (7, -0.6)])
def test_tool_bonus_rewards_calls_of_wrong_answers(make_batch, calls: int, wrong: float) -> None:
    """As in the authors' code: wrong answers gain per call up to the cap, correct ones nothing."""
    reward = resolve(Rl(algorithm="grpo_tcr"), MAX_LENGTH).rl.reward
    shaped = shape_rewards(make_batch([[1, 0]]).with_(tool_calls=torch.full((2,), float(calls))), reward)
    assert shaped.rewards.tolist() == pytest.approx([1.0, wrong])


def test_tool_bonus_on_both_follows_the_paper_equation(make_batch) -> None:
    """n = 4: 1.4."""
    params = resolve(Rl(algorithm="grpo_tcr", reward={"tool_bonus_on": "both"}), MAX_LENGTH).rl.reward
    shaped = shape_rewards(make_batch([[1, 0]]).with_(tool_calls=torch.full((2,), 4.0)), params)
    assert shaped.rewards.tolist() == pytest.approx([1.4, -0.6])


def test_overlong_penalty_by_length() -> None:
    reward = resolve(Rl(algorithm="grpo_tcr"), MAX_LENGTH).rl.reward
    assert (reward.overlong_max, reward.overlong_cache) == (20480, 4096)
    term = overlong_term(torch.tensor([16384, 18432, 20480, 30000]), 20480, 4096, 1.0)
    assert term.tolist() == [0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [(1, 1.35, -1.28, False), (-1, 0.7, 0.8, False), (-1, 1.35, 1.35, True), (-1, 12, 10, False)],
)
def test_clip_higher_and_dual_clip(make_batch, advantage: float, ratio: float, loss: float, gradient: bool) -> None:
    """Losses are the negated objective."""
    params = resolve(Rl(algorithm="grpo_tcr"), MAX_LENGTH).rl.loss
    batch = make_batch([[0.0]], lengths=[1])
    batch = batch.with_(advantages=advantage * batch.mask)
    logprobs = ((batch.logprobs_old + math.log(ratio)) * batch.mask).requires_grad_()
    value = ppo_clip(logprobs, batch, params).sum()
    assert value.item() == pytest.approx(loss, abs=1e-5)
    (slope,) = torch.autograd.grad(value, logprobs)
    assert bool(slope.abs().sum() > 0) is gradient
    assert bool(clipped(logprobs.detach(), batch, params).any()) is not gradient


def loss_of(make_batch, name: str, **section) -> float:
    algorithm = resolve(Rl.model_validate({"algorithm": name, "group_size": 2, **section}), 64)
    batch = make_batch([[1, 0], [0, 1]], lengths=[2, 3, 4, 1])
    batch = batch.with_(logprobs_ref=batch.logprobs_old)
    batch = algorithm.prepare(algorithm.resample(algorithm.shape(batch), 0))
    logprobs = (batch.logprobs_old + 0.4 * torch.sin(torch.arange(batch.mask.numel()).reshape(batch.mask.shape))) * batch.mask
    return float(algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0)).loss)


def test_tcr_without_its_changes_equals_grpo_with_token_mean(make_batch) -> None:
    """Rewards of +/-1 instead of 0 and 1 give the same advantages."""
    bare = loss_of(
        make_batch,
        "grpo_tcr",
        loss={"clip_high": 0.2},
        reward={"tool_bonus": 0.0, "overlong_penalty": 0.0, "tool_bonus_on": None},
    )
    assert bare == pytest.approx(loss_of(make_batch, "grpo", loss={"aggregation": "token_mean"}), abs=1e-6)
    kept = loss_of(make_batch, "grpo_t", loss={"kl_coef": 0.0})
    assert kept == pytest.approx(loss_of(make_batch, "grpo", loss={"aggregation": "token_mean"}), abs=1e-6)


def test_scr_clips_the_sequence_ratio(make_batch) -> None:
    """Token log-ratios (0.01, -0.01, 0.003): exp(0.001) = 1.0010005, above 1.0004, clipped for A > 0."""
    params = resolve(Rl(algorithm="grpo_scr"), MAX_LENGTH).rl.loss
    assert (params.kind, params.clip_low, params.clip_high, params.aggregation) == ("gspo", 0.0003, 0.0004, "seq_mean_token_mean")
    batch = make_batch([[1.0]], lengths=[3])
    batch = batch.with_(advantages=batch.mask.float())
    shift = torch.zeros(batch.mask.shape)
    shift[0, 1:4] = torch.tensor([0.01, -0.01, 0.003])
    logprobs = (batch.logprobs_old + shift).requires_grad_()
    loss = gspo(logprobs, batch, params)
    torch.testing.assert_close(loss[batch.mask], torch.full((3,), -1.0004))
    assert clipped(logprobs.detach(), batch, params)[batch.mask].all()
    assert torch.autograd.grad(loss.sum(), logprobs)[0].abs().sum() == 0
    wide = gspo(logprobs, batch, Loss(kind="gspo", clip_low=0.1, clip_high=0.1))
    torch.testing.assert_close(wide[batch.mask], torch.full((3,), -1.0010005))


@pytest.mark.parametrize("name", ["grpo_t", "grpo_tcr", "grpo_scr"])
def test_environment_tokens_do_not_affect_the_loss(make_batch, name: str) -> None:
    """Other log-probs on environment tokens leave the loss unchanged."""
    algorithm = resolve(Rl(algorithm=name, group_size=2), MAX_LENGTH)
    batch = make_batch([[1, 0]], turns=[[1, 2], [2, 1]])
    batch = algorithm.prepare(algorithm.shape(batch.with_(logprobs_ref=batch.logprobs_old)))
    total = denominators(batch, 8.0)
    inside = batch.logprobs_old + 0.01 * batch.mask
    noisy = torch.where(batch.mask, inside, torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)))
    losses = [float(algorithm.loss(logs, torch.zeros(batch.mask.shape), batch, total).loss) for logs in (inside, noisy)]
    assert losses[0] == losses[1]


def test_overlong_failure_gets_the_length_penalty(make_batch) -> None:
    """-1, and up to -1 for its length."""
    batch = make_batch([[0, 1]], lengths=[8, 2])
    params = Reward(correct=1.0, wrong=-1.0, overlong_penalty=1.0, overlong_max=8, overlong_cache=2)
    assert shape_rewards(batch, params).rewards.tolist() == [-2.0, 1.0]


def test_average_pass_at_k_and_maj_at_k() -> None:
    """The average never exceeds pass@k; for k = 1 all three agree; 2 of 4 correct: pass@2 = 5/6. More on maj@k:
    tests/evaluation/test_statistics.py."""
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    for answers in (["a", "a", "b", "c"], ["a", "a", None, None]):
        right = [answer == "a" for answer in answers]
        assert sum(right) / 4 == pass_at_k(4, 2, 1) == maj_at_k(answers, right, 1)
    for correct in range(5):
        assert pass_at_k(4, correct, 1) == pytest.approx(correct / 4)
        assert all(correct / 4 <= pass_at_k(4, correct, k) + 1e-12 for k in (1, 2, 3, 4))
