"""The progress estimator: contributions by hand, causality, fitting; on tiny models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stages.values.progress import ProgressEstimator, Rollout, evaluate, fit_progress
from stages.values.settings import HeadParams, Progress
from values.test_step_value import backbone


def estimator(loss: str = "mse") -> ProgressEstimator:
    model = ProgressEstimator(backbone(), HeadParams(loss=loss))
    torch.nn.init.normal_(model.output.weight, generator=torch.Generator().manual_seed(0))
    return model.eval()


def test_loss_and_gradient_by_hand() -> None:
    """c = (0.1, 0.2, 0.5), R = 1: R^ = 0.8, loss 0.04, the same gradient -0.4 for every turn."""
    head = estimator().head
    c = torch.tensor([[[0.1], [0.2], [0.5]]], requires_grad=True)
    summed = c.cumsum(1)
    loss = head.loss(summed[:, -1], torch.tensor([1.0]))
    assert head.decode(summed[:, -1]).item() == pytest.approx(0.8)
    assert loss.item() == pytest.approx(0.04)
    loss.sum().backward()
    torch.testing.assert_close(c.grad, torch.full((1, 3, 1), -0.4))


@pytest.mark.parametrize("loss", ["mse", "hl_gauss"])
def test_contributions_are_causal(loss: str) -> None:
    """Contract: c_1 ... c_i do not depend on tokens after e_i or on their order."""
    model = estimator(loss)
    ids = torch.tensor([[1, 5, 2, 6, 3, 8, 9, 4]])
    ends = torch.tensor([[2, 4, 7]])
    found = model.contributions(ids, ends)
    later = ids.clone()
    later[0, 5:] = torch.tensor([11, 12, 13])
    changed = model.contributions(later, ends)
    torch.testing.assert_close(changed[:, :2], found[:, :2])
    assert not torch.allclose(changed[:, 2], found[:, 2])
    swapped = ids.clone()
    swapped[0, 5:7] = torch.tensor([9, 8])
    torch.testing.assert_close(model.contributions(swapped, ends)[:, :2], found[:, :2])


@pytest.mark.parametrize("loss", ["mse", "hl_gauss"])
def test_contributions_sum_to_the_estimate(loss: str) -> None:
    """Contract: with any head c_1 + ... + c_N is the decoded sum; padding turns have 0; with one turn it is an outcome model."""
    model = estimator(loss)
    ids = torch.tensor([[1, 5, 2, 6, 3, 0], [4, 4, 2, 7, 7, 7]])
    ends = torch.tensor([[1, 4, -1], [0, 2, 5]])
    found = model.contributions(ids, ends)
    with torch.no_grad():
        torch.testing.assert_close(found.sum(1), model.head.decode(model.cumulative_logits(ids, ends)[:, -1]))
        single = model.head.decode(model.logits(ids, torch.tensor([[3], [5]])))
    assert found[0, 2] == 0.0
    torch.testing.assert_close(model.contributions(ids, torch.tensor([[3], [5]])), single)


def synthetic_rollouts(tasks: int, each: int = 10) -> list[Rollout]:
    """Episodes of one to three turns; the return is half the number of turns that end with token 3, at most 1."""
    rng = np.random.default_rng(0)
    found = []
    for task in range(tasks):
        for _ in range(each):
            tokens, ends = [1, 2], []
            for _ in range(int(rng.integers(1, 4))):
                tokens += [*rng.integers(5, 16, 2).tolist(), int(rng.integers(3, 5))]
                ends.append(len(tokens) - 1)
            good = sum(tokens[end] == 3 for end in ends)
            found.append(Rollout(f"t{task:02d}", tokens, ends, min(1.0, good / 2)))
    return found


@pytest.mark.parametrize("loss", ["mse", "hl_gauss"])
def test_fit_attributes_returns_to_the_turns_that_earn_them(loss: str) -> None:
    """Contract: fitted only to final returns, it distinguishes turns that earn 1/2 from those that earn nothing."""
    params = Progress(kind="spa", epochs=12, learning_rate=5e-3, batch_tokens=512, head={"loss": loss})
    train, held_out = synthetic_rollouts(8), synthetic_rollouts(10)[80:]
    model, report = fit_progress(backbone(), train, params, 0, 10_000)
    judged = evaluate(model, held_out, 0.45, 64)
    assert report.clamped == 0.0
    assert judged["explained_variance"] > 0.6
    good, idle = [], []
    for one in held_out:
        c = model.contributions(torch.tensor([one.token_ids]), torch.tensor([one.ends]))[0].tolist()
        for end, value in zip(one.ends, c, strict=True):
            (good if one.token_ids[end] == 3 else idle).append(value)
    assert sum(good) / len(good) - sum(idle) / len(idle) > 0.25
    again, _ = fit_progress(backbone(), train, params, 0, 10_000)
    assert all(value.equal(again.state_dict()[name]) for name, value in model.state_dict().items())


def test_initial_contribution_is_the_mean_return_per_turn(tmp_path: Any) -> None:
    rollouts = [Rollout("a", [1, 2, 3, 4], [1, 3], 1.0), Rollout("b", [1, 2, 3, 4], [1, 3], 0.0)]
    params = Progress(kind="spa", epochs=1, learning_rate=1e-12)
    model, _ = fit_progress(backbone(), rollouts, params, 0, 100)
    found = model.contributions(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 3]]))
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.25]]), atol=1e-5, rtol=0)
    model.save(tmp_path)
    loaded = ProgressEstimator.load(tmp_path)
    assert loaded.contributions(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 3]])).equal(found)
