"""RAVL's pessimism, and its ensemble of heads in the Q-model for best-of-n."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.agent.policy import load_policy
from stages.annotation.decisions import Decision
from stages.annotation.q_fitting import disagreements, evaluate, fit_regression
from stages.annotation.settings import Annotate
from stages.records.sections import params_hash
from stages.values.pessimism import aggregated, disagreement
from stages.values.q_model import RegressionQ, load_q_model
from stages.values.settings import QModel
from stages.values.step_value import StepValueModel

HISTORY, KNOWN, UNKNOWN = (5, 6, 7, 8), ((9, 10), (11,)), ((12, 13, 14), (20, 3))


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Any:
    return load_policy(tiny_policy, attention="sdpa")


def decision(task: str = "t") -> Decision:
    return Decision(task, HISTORY, KNOWN, ((True, True), (True,)), (0.8, 0.2), (1.0, 1.0))


def test_targets_by_hand() -> None:
    """Values 1, 3 and 2 with reward 0.5 and gamma 0.99: 1.49, and 2.48 with their mean."""
    values = torch.tensor([1.0, 3.0, 2.0])
    assert 0.5 + 0.99 * float(aggregated(values, "min")) == pytest.approx(1.49)
    assert 0.5 + 0.99 * float(aggregated(values, "mean")) == pytest.approx(2.48)
    assert float(disagreement(values)) == pytest.approx((2 / 3) ** 0.5)


@pytest.mark.parametrize(("members", "expected"), [(1, 0.0), (2, -0.564), (10, -1.539)])
def test_pessimism_of_members_that_know_nothing(members: int, expected: float) -> None:
    draws = torch.randn(members, 100_000, generator=torch.Generator().manual_seed(members))
    assert float(aggregated(draws, "min").mean()) == pytest.approx(expected, abs=0.02)


def made(policy: Any, **ensemble: Any) -> RegressionQ:
    """An untrained ensemble."""
    params = QModel(kind="regression", head={"loss": "mse"}, ensemble=ensemble)
    model = RegressionQ(StepValueModel(policy.model.base_model, params.head), params)
    model.start_apart(3)
    return model.eval()


def test_scores_are_the_smallest_or_the_mean_value_of_the_members(policy: Any, tmp_path: Path) -> None:
    """Members with biases 1, 3 and 2 and no weights; saved and read again they score the same."""
    for aggregate, expected in (("min", 1.0), ("mean", 2.0)):
        model = made(policy, members=3, aggregate=aggregate)
        with torch.no_grad():
            for member, bias in zip(model.members, (1.0, 3.0, 2.0), strict=True):
                member.weight.zero_()
                member.bias.fill_(bias)
        assert model.scores(HISTORY, KNOWN).tolist() == [expected] * 2
        model.save(tmp_path / aggregate, policy.hash)
        assert load_q_model(tmp_path / aggregate, policy.folder).scores(HISTORY, KNOWN).tolist() == [expected] * 2


def test_members_start_apart(policy: Any) -> None:
    """By about `spread`, each with its own draws; the same key gives the same ones."""
    values = made(policy, members=32, spread=2.0).member_scores(HISTORY, KNOWN)
    with torch.no_grad():
        states = policy.model.base_model(torch.tensor([[*HISTORY, *KNOWN[0]]])).last_hidden_state
    scale = float(states[0, -1].square().mean().sqrt())
    assert float(values[:, 0].std()) == pytest.approx(2.0 * scale, rel=0.35)
    assert len(set(values[:, 0].tolist())) == 32
    assert torch.equal(values, made(policy, members=32, spread=2.0).member_scores(HISTORY, KNOWN))


def test_members_agree_on_data_and_are_pessimistic_elsewhere(policy: Any) -> None:
    """After training, values of known actions are the labels' for all members; unknown actions rank below their mean value."""
    params = QModel(
        kind="regression", epochs=60, learning_rate=3e-3, batch_tokens=256, head={"loss": "mse"}, ensemble={"members": 6}
    )
    data = [decision(task) for task in "abcd"]
    model, report = fit_regression(policy.model.base_model, data, params, 0, 10_000)
    known, unknown = model.member_scores(HISTORY, KNOWN), model.member_scores(HISTORY, UNKNOWN)
    assert report.history[-1] < 0.1 * report.history[0]
    assert float((known - torch.tensor([0.8, 0.2])).abs().max()) < 0.1
    assert disagreements(model, data) == pytest.approx(float(disagreement(known).mean()), abs=1e-6)
    assert float(disagreement(unknown).mean()) > 5 * float(disagreement(known).mean())
    assert bool((model.scores(HISTORY, UNKNOWN) < unknown.mean(0) - 0.1).all())
    assert evaluate(model, data, 0.25)["accuracy"] == 1.0


def test_diversity_keeps_the_members_gradients_apart(policy: Any) -> None:
    """With equal labels and weights, members of EDAC end less alike than without."""
    found = []
    for diversity in (0.0, 5.0):
        ensemble = {"members": 3, "spread": 0.1, "diversity": diversity}
        params = QModel(
            kind="regression", epochs=20, learning_rate=1e-2, batch_tokens=256, head={"loss": "mse"}, ensemble=ensemble
        )
        model, _ = fit_regression(policy.model.base_model, [decision(task) for task in "abcd"], params, 0, 10_000)
        weights = torch.stack([member.weight[0] for member in model.members])
        units = torch.nn.functional.normalize(weights, dim=-1)
        found.append(float((units @ units.T).sum().detach() - 3))
    assert found[1] < found[0] - 0.2


def test_bad_settings_are_refused_and_the_default_hash_stays() -> None:
    with pytest.raises(ValueError, match=r"q_model\.ensemble has no effect: it needs kind: regression"):
        Annotate(q_model={"kind": "step_dpo", "ensemble": {}})
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        Annotate(q_model={"kind": "regression", "ensemble": {"members": 1}})
    values = Annotate().model_dump(mode="json")
    del values["q_model"]["ensemble"]
    assert params_hash(values) == params_hash(Annotate())
