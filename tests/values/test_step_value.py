"""The step-value model: targets along tree paths, fitting, calibration, saving; on tiny models."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from stages.annotation.calibration import calibration
from stages.annotation.paths import mean_value, value_paths
from stages.annotation.settings import Annotate
from stages.values import head_fitting
from stages.values.fitting import TaskSplit, epoch_batches
from stages.values.heads import make_head
from stages.values.settings import HeadParams, ValueModel
from stages.values.step_value import StepValueModel, fit, predict

from .value_histories import backbone, split, synthetic_paths


def node(index: int, parent: int, n: int, c: int, tokens: list[int], context: list[int], **changes: Any) -> dict[str, Any]:
    base = {"task_id": "t", "node": index, "parent": parent, "depth": 0, "N": n + 2, "W": float(c), "reward": 0.0}
    base |= {"n_success": c, "n_rollouts": n, "terminal": not context, "truncated": False}
    base |= dict.fromkeys(("R", "R2"), float(c) if context else 0.0)
    return {**base, "token_ids": tokens, "context_ids": context, **changes}


TREE = [
    node(0, -1, 4, 2, [], [1, 2, 3]),
    node(1, 0, 3, 2, [4, 5], [6]),
    node(2, 0, 1, 0, [7], [8, 9]),
    node(3, 1, 2, 2, [10], [11]),
    node(4, 1, 1, 0, [12], []),
    node(5, 3, 2, 2, [13], []),
]


def test_paths_cover_every_acting_node_once():
    """Contract: paths cover each node where the policy acts exactly once, at its last context token, weighted by rollouts."""
    first, second = value_paths(TREE, Annotate())
    assert first.token_ids == [1, 2, 3, 7, 8, 9]
    assert (first.boundaries, first.returns, first.rollouts) == ([2, 5], [2.0, 0.0], [4.0, 1.0])
    assert second.token_ids == [1, 2, 3, 4, 5, 6, 10, 11]
    assert (second.boundaries, second.returns, second.rollouts) == ([5, 7], [2.0, 2.0], [3.0, 2.0])
    assert mean_value([first, second]) == pytest.approx(6 / 10)


def test_turn_values_depend_only_on_tokens_up_to_the_boundary():
    """Contract: [B, U] values depend on the tokens up to each boundary, not on padding or neighbours; -1 has value 0."""
    model = StepValueModel(backbone(), HeadParams())
    torch.nn.init.normal_(model.output.weight)
    ids = torch.tensor([[1, 5, 2, 6, 3, 0, 0], [4, 4, 2, 7, 7, 7, 3]])
    both = model.turn_values(ids, torch.tensor([5, 7]), torch.tensor([[2, 4, -1], [2, 5, 6]]))
    alone = model.turn_values(ids[:1, :5], torch.tensor([5]), torch.tensor([[4, 2]]))
    assert both.shape == (2, 3)
    assert both[0, 2] == 0.0
    torch.testing.assert_close(alone[0], both[0, [1, 0]], atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="past the end of its sequence"):
        model.turn_values(ids, torch.tensor([5, 7]), torch.tensor([[5], [6]]))


@pytest.mark.parametrize("loss", ["mse", "two_hot", "hl_gauss", "c51"])
def test_untrained_model_predicts_the_mean(loss: str):
    """Contract: before its first step a model with any head predicts the weighted mean of its targets."""
    model = StepValueModel(backbone(), HeadParams(loss=loss))
    shares, weights = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([2.0, 1.0, 1.0])
    model.start_at(shares, weights)
    batch = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 2]])
    values = model.turn_values(batch[0], torch.tensor([3]), batch[1])
    assert values.flatten().tolist() == pytest.approx([0.375, 0.375], abs=1e-4)
    if loss != "mse":
        encoded = model.head.encode(shares)
        mean = (encoded * weights[:, None]).sum(0) / 4
        torch.testing.assert_close(model.logits(*batch)[0, 0].softmax(-1), mean, atol=1e-4, rtol=0)


@pytest.mark.parametrize("loss", ["mse", "hl_gauss"])
def test_fit_learns_values_of_held_out_tasks(loss: str):
    """Contract: the model predicts success on tasks it has not seen, far better than their mean."""
    params = ValueModel(trains="all", epochs=12, learning_rate=5e-3, batch_tokens=256, head=HeadParams(loss=loss))
    train, held_out = split(synthetic_paths(20), 0.2, seed=0)
    model = StepValueModel(backbone(), params.head)
    report = fit(model, train, params, seed=0, micro_tokens=10_000)
    assert report.history[-1] < report.history[0]
    found = calibration(*predict(model, held_out, 10_000), mean_value(train))
    assert found["mse"] < 0.1 * found["baseline_mse"]
    assert found["explained_variance"] > 0.9
    assert found["correlation"] > 0.95


@pytest.mark.parametrize("loss", ["mse", "hl_gauss"])
def test_head_alone_learns_and_leaves_the_backbone(loss: str) -> None:
    """Contract: by default the backbone's weights stay as they are, and the values of unseen tasks are learnt nevertheless."""
    train, held_out = split(synthetic_paths(20), 0.2, seed=0)
    model = StepValueModel(backbone(), HeadParams(loss=loss))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = fit(model, train, ValueModel(head=model.params), seed=0, micro_tokens=10_000)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"output.weight", "output.bias"}
    assert report.history[-1] < report.history[0]
    assert report.l2 in head_fitting.L2
    assert all(parameter.requires_grad for parameter in model.parameters()), "a critic that starts from it trains all of it"
    found = calibration(*predict(model, held_out, 10_000), mean_value(train))
    assert found["explained_variance"] > 0.9


def test_head_alone_is_ridge_regression_with_squared_errors() -> None:
    """Contract: the minimum is the one that linear algebra gives; the mean is not penalised."""
    torch.manual_seed(0)
    x, weights = torch.randn(30, 5, dtype=torch.float64) * torch.arange(1, 6) + 3, torch.rand(30, dtype=torch.float64) + 0.5
    y = (x @ torch.randn(5, dtype=torch.float64)) * 0.1 + torch.randn(30, dtype=torch.float64) * 0.2
    states = head_fitting.States(x.float(), y.float(), weights.float(), ["t"] * 30)
    found = head_fitting.solve(make_head(HeadParams(loss="mse")), states, torch.zeros(1), l2=0.3)
    scaled = (x - x.mean(0)) / x.std(0, correction=0)
    shares = weights / weights.sum()
    centred, target = scaled - shares @ scaled, y - shares @ y
    ridge = torch.linalg.solve(centred.T @ (shares[:, None] * centred) + 0.3 * torch.eye(5), centred.T @ (shares * target))
    expected = centred @ ridge + shares @ y
    torch.testing.assert_close(found(x.float())[:, 0].double(), expected, atol=1e-3, rtol=1e-3)


def test_the_penalty_is_chosen_on_other_tasks() -> None:
    """Contract: states that differ by task alone, and tell nothing of other tasks, get the largest penalty; telling ones a small
    one."""
    torch.manual_seed(0)
    tasks = [f"t{number}" for number in range(12) for _ in range(6)]
    of_task = torch.randn(12, 20).repeat_interleave(6, 0)
    noise = (torch.rand(12) < 0.5).float().repeat_interleave(6)
    head, ones, start = make_head(HeadParams(loss="mse")), torch.ones(72), torch.zeros(1)
    assert head_fitting.choose_l2(head, head_fitting.States(of_task, noise, ones, tasks), start, 0) == max(head_fitting.L2)
    telling = torch.randn(72, 3)  # other states of each task, which tell the target
    assert head_fitting.choose_l2(head, head_fitting.States(telling, telling[:, 0] * 0.3, ones, tasks), start, 0) == min(
        head_fitting.L2
    )
    assert head_fitting.choose_l2(head, head_fitting.States(of_task[:6], noise[:6], ones[:6], tasks[:6]), start, 0) == max(
        head_fitting.L2
    )


@pytest.mark.parametrize("params", [ValueModel(trains="all", epochs=1.5, learning_rate=1e-3, batch_tokens=256), ValueModel()])
def test_fit_is_independent_of_micro_batches(params: ValueModel):
    """Contract: how a batch is split in memory changes the fitted values by rounding only (a head alone: as far as the solver
    goes); the same call gives the same bytes."""
    weights, values = [], []
    for micro in (10_000, 40, 10_000):
        model = StepValueModel(backbone(), params.head)
        fit(model, synthetic_paths(6), params, seed=3, micro_tokens=micro)
        weights.append(torch.cat([tensor.flatten() for tensor in model.state_dict().values()]))
        values.append(predict(model, synthetic_paths(6), 10_000)[0])
    if params.trains == "all":
        torch.testing.assert_close(weights[0], weights[1], atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(values[0], values[1], atol=2e-3)
    assert torch.equal(weights[0], weights[2])


def test_epochs_visit_every_path_once():
    """Contract: an epoch's batches hold each path once, within the token budget, in a different order each epoch."""
    paths = synthetic_paths(10)
    first, second = (epoch_batches(paths, 100, 0, "epoch", number) for number in (0, 1))
    assert first != second
    for batches in (first, second):
        assert sorted(id(path) for batch in batches for path in batch) == sorted(id(path) for path in paths)
        assert all(len(batch) * max(len(path.token_ids) for path in batch) <= 100 for batch in batches)


def test_split_keeps_tasks_whole():
    """Contract: no task is on both sides of the split; one task alone cannot be split."""
    train, held_out = split(synthetic_paths(10), 0.15, seed=1)
    tasks = [{path.task_id for path in side} for side in (train, held_out)]
    assert (len(tasks[0]), len(tasks[1])) == (8, 2)
    assert not tasks[0] & tasks[1]
    with pytest.raises(ValueError, match="at least 2 tasks"):
        split(synthetic_paths(1), 0.15, seed=1)


def test_new_tasks_join_the_split():
    """Contract: new tasks are held out in the same proportion; known ones stay on their side."""
    first = TaskSplit.of([f"t{number}" for number in range(10)], 0.2, seed=1)
    wider = first.with_tasks([*(f"t{number}" for number in range(5)), *(f"u{number}" for number in range(10))])
    assert len(first.held_out) == 2
    assert {task for task in wider.held_out if task.startswith("t")} == set(first.held_out)
    assert len(wider.held_out) == 4
    assert first.with_tasks(["t1"]) == first


def test_saved_model_gives_the_same_values(tmp_path):
    """Contract: load(save(model)) predicts the same; saving twice writes the same bytes; a missing file is named."""
    model = StepValueModel(backbone(), HeadParams(bins=21)).eval()
    torch.nn.init.normal_(model.output.weight)
    for name in ("one", "two"):
        copy.deepcopy(model).save(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["config.json", "head.json", "head.safetensors", "model.safetensors"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    loaded = StepValueModel.load(tmp_path / "one")
    batch = torch.tensor([[1, 2, 3, 4]]), torch.tensor([4]), torch.tensor([[1, 3]])
    assert torch.equal(loaded.turn_values(*batch), model.turn_values(*batch))
    assert loaded.params == model.params
    (tmp_path / "one" / "head.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"head\.safetensors is missing"):
        StepValueModel.load(tmp_path / "one")


def test_calibration_by_hand():
    """Contract: rollout-weighted Brier score, MSE, baseline, explained variance, ECE and bins of three nodes."""
    predicted, shares, counts = np.array([0.25, 0.25, 0.85]), np.array([0.0, 0.5, 1.0]), np.array([1.0, 1.0, 2.0])
    found = calibration(predicted, shares, counts, baseline=0.5)
    assert found["mse"] == pytest.approx((0.0625 + 0.0625 + 2 * 0.0225) / 4)
    assert found["baseline_mse"] == pytest.approx((0.25 + 0 + 2 * 0.25) / 4)
    assert found["brier"] == pytest.approx((0.0625 + (0.5 * 0.5625 + 0.5 * 0.0625) + 2 * 0.0225) / 4)
    assert found["ece"] == pytest.approx(2 / 4 * 0.0 + 2 / 4 * 0.15)
    filled = [(item["low"], item["predicted"], item["observed"], item["count"]) for item in found["bins"]]
    assert filled == [(0.2, pytest.approx(0.25), pytest.approx(0.25), 2.0), (0.8, pytest.approx(0.85), pytest.approx(1.0), 2.0)]
    residual = shares - predicted
    weight = counts / 4
    assert found["explained_variance"] == pytest.approx(
        1
        - np.average((residual - weight @ residual) ** 2, weights=weight)
        / np.average((shares - weight @ shares) ** 2, weights=weight)
    )
    constant = calibration(np.full(3, 0.4), np.full(3, 0.4), counts, 0.4)
    assert (constant["explained_variance"], constant["correlation"], constant["ece"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("rollouts", [2, 8])
def test_explainable_is_what_the_true_values_explain(rollouts: int) -> None:
    """Contract: found from shares of few rollouts alone, without the values behind them."""
    rng = np.random.default_rng(0)
    values = rng.beta(1.0, 2.0, 40_000)
    shares = rng.binomial(rollouts, values) / rollouts
    found = calibration(values, shares, np.full(len(values), float(rollouts)), baseline=1 / 3)
    assert found["explainable"] == pytest.approx(found["explained_variance"], abs=0.02)
    assert found["explainable"] == pytest.approx(values.var() / shares.var(), abs=0.02)
    once = calibration(values, shares.round(), np.ones(len(values)), baseline=1 / 3)
    assert once["explainable"] == 0.0, "single rollouts tell nothing of it"
