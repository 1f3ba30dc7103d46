"""Linear-quadratic control against scipy and simulation, small models against reduced-rank regression, refusals by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import yaml
from pydantic import ValidationError

from stages.control.linear import limited_models
from stages.control.linear.limited_models import fit, loss, run, state_spread, transitions, value_gradients
from stages.control.linear.quadratic import distracted
from stages.control.linear.settings import LinearModel

SYSTEM = distracted(4, 0.95)


def test_values_are_riccatis() -> None:
    root = np.sqrt(SYSTEM.gamma)
    expected = scipy.linalg.solve_discrete_are(root * SYSTEM.a, root * SYSTEM.b, SYSTEM.q, SYSTEM.r)
    assert SYSTEM.value() == pytest.approx(expected, abs=1e-7)
    assert not SYSTEM.value()[2:].any()


def test_costs_are_those_of_simulated_states() -> None:
    gain, state = SYSTEM.gain(SYSTEM.value()), np.array([1.0, -0.5, 2.0, 0.0, 1.0, 1.0])
    total, at = 0.0, state
    for step in range(600):
        action = -gain @ at
        total += 0.95**step * float(at @ SYSTEM.q @ at + action @ SYSTEM.r @ action)
        at = SYSTEM.a @ at + SYSTEM.b @ action
    assert SYSTEM.cost(gain, np.outer(state, state)) == pytest.approx(total)
    assert SYSTEM.cost(gain, np.outer(state, state)) == pytest.approx(state @ SYSTEM.value() @ state)


def test_no_controller_costs_less_than_the_best() -> None:
    rng, gain = np.random.default_rng(0), SYSTEM.gain(SYSTEM.value())
    best = SYSTEM.cost(gain, np.eye(6))
    assert all(SYSTEM.cost(gain + 0.3 * rng.normal(size=gain.shape), np.eye(6)) >= best for _ in range(50))
    assert SYSTEM.cost(-10 * gain, np.eye(6)) == float("inf")


def test_gradients_of_the_value() -> None:
    state, value, step = np.arange(1.0, 7.0), SYSTEM.value(), 1e-5 * np.eye(6)
    found = value_gradients(SYSTEM, state[None])[0]
    for number in range(6):
        one, other = state + step[number], state - step[number]
        assert found[number] == pytest.approx((one @ value @ one - other @ value @ other) / 2e-5, abs=1e-4)


def fitted(kind: str, **values: Any) -> tuple[np.ndarray, ...]:
    settings = LinearModel.model_validate({"distractors": 4, "data": 100, **values})
    inputs, following = transitions(SYSTEM, settings)
    gradients = value_gradients(SYSTEM, following)
    return *fit(kind, inputs, following, gradients, settings), inputs, following, gradients


@pytest.mark.parametrize("kind", ["mse", "vaml", "vagram"])
def test_sweeps_lower_the_loss_of_their_kind(kind: str) -> None:
    found = []
    for sweeps in (1, 3, 10, 40):
        outer, inner, inputs, following, gradients = fitted(kind, sweeps=sweeps)
        found.append(loss(kind, inputs @ (outer @ inner).T - following, gradients))
    assert found == pytest.approx(sorted(found, reverse=True), rel=1e-6)
    for other in {"mse", "vaml", "vagram"} - {kind}:
        outer, inner, inputs, following, gradients = fitted(other, sweeps=40)
        assert loss(kind, inputs @ (outer @ inner).T - following, gradients) >= found[-1] - 1e-6


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_squared_error_gives_reduced_rank_regression(rank: int) -> None:
    """Its optimum is the least-squares prediction, projected on its leading singular vectors."""
    outer, inner, inputs, following, gradients = fitted("mse", rank=rank, sweeps=300)
    full = inputs @ np.linalg.lstsq(inputs, following, rcond=None)[0]
    left, sizes, right = np.linalg.svd(full, full_matrices=False)
    best = (left[:, :rank] * sizes[:rank]) @ right[:rank]
    expected = loss("mse", best - following, gradients)
    assert loss("mse", inputs @ (outer @ inner).T - following, gradients) == pytest.approx(expected, rel=1e-4)


def test_what_has_no_value_is_not_learnt() -> None:
    outer, inner, *_ = fitted("vagram")
    model = outer @ inner
    assert np.abs(model[2:]).max() < 1e-6
    assert model[:2, :2] == pytest.approx(SYSTEM.a[:2, :2], abs=0.05)


def test_the_bound_of_vaml() -> None:
    """Errors (0.5, -1) with gradients (2, 1) cancel, and the bound is 2 * (1 + 1) = 4; a run's figures keep to it."""
    errors, gradients = np.array([[0.5, -1.0]]), np.array([[2.0, 1.0]])
    assert loss("vaml", errors, gradients) == 0.0
    assert errors.shape[1] * loss("vagram", errors, gradients) == 4.0
    for kind in ("mse", "vaml", "vagram"):
        found = run(LinearModel(loss=kind, distractors=4, seed=5))
        assert 0.0 < found["vaml_error"] <= found["vaml_bound"]
        assert found["vaml_bound"] == pytest.approx(6 * found["value_error"])  # root of 6 times the sum of 6 dimensions


def test_squared_error_spends_the_model_on_distractors() -> None:
    found = {kind: run(LinearModel(loss=kind, distractors=4, seed=5)) for kind in ("mse", "vagram")}
    assert found["mse"]["cost_ratio"] > 5
    assert found["vagram"]["cost_ratio"] < 1.05
    assert found["mse"]["model_error"] < found["vagram"]["model_error"]
    assert found["mse"]["value_error"] > found["vagram"]["value_error"]
    assert found["mse"]["log_cost_ratio"] == pytest.approx(np.log(found["mse"]["cost_ratio"]))


@pytest.mark.parametrize("values", [{"distractors": 0}, {"distractors": 4, "rank": 6}])
def test_large_models_are_good_by_any_loss(values: dict[str, Any]) -> None:
    found = [run(LinearModel.model_validate({"loss": kind, **values}))["cost_ratio"] for kind in ("mse", "vaml", "vagram")]
    assert found == pytest.approx([1.0] * 3, abs=0.02)


def test_a_controller_that_diverges_counts_as_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(SYSTEM, b=-SYSTEM.b)
    assert SYSTEM.cost(wrong.gain(wrong.value()) * 20, np.eye(6)) == float("inf")
    monkeypatch.setattr(limited_models, "WORST", 1.5)
    assert run(LinearModel(loss="mse", distractors=4))["cost_ratio"] == 1.5


def test_spreads() -> None:
    assert state_spread(LinearModel(distractors=2, amplitude=4.0)).tolist() == [1.0, 1.0, 4.0, 4.0]


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"distractors": 2, "data": 50, "seed": 3}
    settings, result = tmp_path / "settings.yaml", tmp_path / "result.json"
    settings.write_text(yaml.safe_dump(values))
    monkeypatch.setattr("sys.argv", ["limited_models", "--settings", str(settings), "--result", str(result)])
    assert limited_models.main() == 0
    expected = {f"control.{name}": value for name, value in run(LinearModel.model_validate(values)).items()}
    assert json.loads(result.read_text()) == {**expected, "environment_steps": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"distractors": 3}, "distractors 3 must be even"),
        ({"rank": 13}, "rank 13 is more than 12"),
        ({"distractors": 0, "amplitude": 1.0}, "amplitude has no effect: it needs distractors"),
        ({"loss": "nll"}, "Input should be 'mse', 'vaml' or 'vagram'"),
        ({"gamma": 1.0}, "less than 1"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LinearModel.model_validate(values)
