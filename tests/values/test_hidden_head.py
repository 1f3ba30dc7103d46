"""A value head with one hidden layer: what it learns, when it stops, what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.annotation.calibration import calibration
from stages.annotation.paths import mean_value
from stages.params import ParamsError, parse_params
from stages.values import head_fitting, hidden_head
from stages.values.heads import make_head
from stages.values.settings import HeadParams, ValueModel
from stages.values.step_value import StepValueModel, fit, predict

from .value_histories import backbone, split, synthetic_paths

HIDDEN = 32


def product(tasks: int, each: int = 40) -> head_fitting.States:
    """Targets that no linear head predicts: whether two coordinates have the same sign."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tasks * each, 4, generator=generator) * torch.tensor([1.0, 5.0, 1.0, 1.0]) + 2
    same = ((x[:, 0] - 2) * (x[:, 1] - 2) > 0).float()
    return head_fitting.States(x, same, torch.ones(len(x)), [f"t{number}" for number in range(tasks) for _ in range(each)])


@pytest.mark.parametrize("loss", ["mse", "hl_gauss"])
def test_it_learns_what_no_linear_head_can(loss: str) -> None:
    """Contract: on states of any scale; the fitted layers give the values, and the report the epochs that were chosen."""
    head, states = make_head(HeadParams(loss=loss)), product(60)
    output = hidden_head.make_hidden(4, 4 * HIDDEN, head.outputs)
    unfitted = head.decode(output(states.x))
    assert torch.equal(unfitted, unfitted[:1].expand_as(unfitted)), "it starts as a constant"
    report = hidden_head.fit_hidden(output, head, states, seed=0)
    error = (head.decode(output(states.x)) - states.targets).square().mean()
    linear = head_fitting.solve(head, states, torch.zeros(head.outputs), min(head_fitting.L2))
    linear_error = (head.decode(linear(states.x)) - states.targets).square().mean()
    assert error < 0.5 * linear_error
    assert report.epochs == max(hidden_head.EPOCHS)
    assert report.steps == report.epochs * -(-len(states.x) // hidden_head.ROWS)
    assert report.history[-1] < report.history[0]


def test_it_stops_before_it_knows_tasks_by_heart() -> None:
    """Contract: states that tell the task alone, whose targets are random, get the fewest epochs; so does a single task."""
    generator = torch.Generator().manual_seed(0)
    of_task = torch.randn(12, 20, generator=generator).repeat_interleave(40, 0)
    noise = (torch.rand(12, generator=generator) < 0.5).float().repeat_interleave(40)
    tasks = [f"t{number}" for number in range(12) for _ in range(40)]
    head, start = make_head(HeadParams(loss="mse")), torch.full((1,), 0.5)
    states = head_fitting.States(of_task, noise, torch.ones(480), tasks)
    assert hidden_head.choose_epochs(head, states, HIDDEN, start, 0) == min(hidden_head.EPOCHS)
    one = states.rows(torch.arange(480) < 40)
    assert hidden_head.choose_epochs(head, one, HIDDEN, start, 0) == min(hidden_head.EPOCHS)


def test_the_fit_repeats_and_leaves_the_global_generator_alone() -> None:
    head, states, fitted = make_head(HeadParams(loss="mse")), product(6), []
    for _ in range(2):
        torch.manual_seed(len(fitted))
        before = torch.get_rng_state()
        output = hidden_head.make_hidden(4, HIDDEN, 1)
        output[2].bias.data.fill_(0.5)
        hidden_head.fit_hidden(output, head, states, seed=0)
        fitted.append(output.state_dict())
        untouched = torch.manual_seed(len(fitted) - 1).get_state()
        assert torch.equal(before, untouched)
    assert all(torch.equal(fitted[0][name], fitted[1][name]) for name in fitted[0])


def test_the_model_learns_values_of_unseen_tasks_and_is_saved(tmp_path: Path) -> None:
    """Contract: as with a linear head, the backbone's weights stay as they are; load(save(model)) predicts the same."""
    train, held_out = split(synthetic_paths(20), 0.2, seed=0)
    params = ValueModel(hidden=HIDDEN)
    model = StepValueModel(backbone(), params.head, params.hidden)
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    report = fit(model, train, params, seed=0, micro_tokens=10_000)
    assert report.l2 is None
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())
    found = predict(model, held_out, 10_000)
    assert calibration(*found, mean_value(train))["explained_variance"] > 0.8
    model.save(tmp_path / "model")
    loaded = StepValueModel.load(tmp_path / "model")
    assert (predict(loaded, held_out, 10_000)[0] == found[0]).all()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"annotate": {"value_model": {"trains": "all", "hidden": 8}}},
            r"value_model\.hidden has no effect: it needs trains: head",
        ),
        ({"annotate": {"value_model": {"l2": 0.1, "hidden": 8}}}, r"value_model\.l2 has no effect: it needs .* hidden: 0"),
        (
            {
                "annotate": {"tasks": 8, "value_model": {"hidden": 8}},
                "rl": {"algorithm": "ppo", "critic": {"init": "value_model", "head": {"loss": "hl_gauss"}}},
            },
            r"starts from a linear head, and annotate\.value_model\.hidden is 8: set it to 0",
        ),
    ],
)
def test_where_it_has_no_place_it_is_refused(sections: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        parse_params({"domains": ["search"], "per_domain": {"search": {}}, **sections})
