"""Trees of the current policy during rl: their cost, the value model that follows them, exact resume."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from stages import rl
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.critic import check_returns
from stages.algorithms.settings import Rl
from stages.params import parse_params
from stages.runtime.validation import ParamsError
from stages.training.rl import reannotation
from stages.values.settings import HeadParams
from training.test_value_uses import store_value_model
from training.toys import KilledError, kill_at_step, outputs, run

RL: dict[str, Any] = {
    "steps": 4,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
    "credit": {"kind": "annotated"},
}
TREES = {
    "every": 2,
    "annotate": {"tasks": 6, "iterations": 4, "sampling": {"max_tokens": 3}, "value_model": {"trains": "all", "epochs": 1}},
}


def make(make_context, tiny_policy, name: str, **section: Any):
    context = make_context("rl", name, rl=section)
    store_value_model(context.root / "data/annotated/toy", tiny_policy, HeadParams())
    return context


def test_value_model_follows_the_policy_and_resumes_to_the_same_bytes(make_context, tiny_policy):
    """Contract: until the first new trees nothing changes; then the step credit is that of the new model, which is part of the
    checkpoint, and the trees' turns count as environment steps."""
    section = {**RL, "reannotate": TREES}
    plain = make(make_context, tiny_policy, "plain", **section)
    history = run(plain)
    without = run(make(make_context, tiny_policy, "without", **RL))
    for row, other in zip(history[:2], without[:2], strict=True):
        assert {name: row[name] for name in other} == other
    assert history[2]["success"] == without[2]["success"], "the trees changed what is played before an update"
    assert history[2]["grad_norm"] != without[2]["grad_norm"]
    assert history[2]["tree_steps"] > 0
    assert history[2]["environment_steps"] == without[2]["environment_steps"] + history[2]["tree_steps"]
    assert [row["tree_steps"] > 0 for row in history] == [False, False, True, False]
    assert history[2]["value_explained_variance"] == history[2]["value_explained_variance"], "it is reported"
    report = json.loads((plain.root / "reports/rl/toy.json").read_text())
    assert report["environment_steps"] == sum(row["environment_steps"] for row in history)
    killed = make(make_context, tiny_policy, "killed", **section)
    kill_at_step(killed, 4)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make(make_context, tiny_policy, "killed", **section))
    assert outputs(killed.root) == outputs(plain.root)


def test_draws_follow_the_sections_seed(make_context, tiny_policy):
    """Contract: rl.seed decides the trees and the fit; the run's seed, which stages before rl use, does not."""
    section = {**RL, "steps": 3, "reannotate": TREES, "seed": 5}
    found = []
    for name in ("one", "other"):
        context = make(make_context, tiny_policy, name, **section)
        context.params = context.params.model_copy(update={"seed": len(found)})
        found.append([row.get("value_explained_variance") for row in run(context)][-1])
    assert found[0] == found[1]


def test_self_imitation_stores_correct_paths_of_new_trees(make_context, tiny_policy, monkeypatch):
    """Contract: without step credit no value model is fitted."""
    monkeypatch.setattr(reannotation, "fit_value_model", None)
    section = {**RL, "credit": {"kind": "outcome"}, "imitation": {"ratio": 1.0}, "steps": 3}
    trees = {**TREES, "annotate": {key: value for key, value in TREES["annotate"].items() if key != "value_model"}}
    context = make_context("rl", "trees", rl={**section, "reannotate": trees})
    history, without = run(context), run(make_context("rl", "without", rl=section))
    assert history[2]["imitation_turns"] > without[2]["imitation_turns"]
    assert "value_explained_variance" not in history[2]


def test_returns_are_the_domains() -> None:
    given = resolve(Rl(credit={"kind": "annotated"}, reannotate=TREES), 64).rl
    for check in (partial(check_returns, given), given.reannotate.check_returns):
        check(0.0, 1.0)
        with pytest.raises(ParamsError, match=r"annotate\.returns is \[0\.0, 1\.0\], and the domain's .* \[-1\.0, 1\.0\]"):
            check(-1.0, 1.0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"reannotate": {"every": 5}}, "rl.reannotate.every has no effect here: it needs credit.kind: annotated, or an"),
        ({"credit": {"kind": "annotated"}, "reannotate": {"annotate": {"tasks": 3}}}, "rl.reannotate.annotate has no effect"),
        ({"credit": {"kind": "annotated"}, "reannotate": {"every": 5, "annotate": {"tassks": 3}}}, "unknown key 'tassks'"),
        (
            {"credit": {"kind": "annotated"}, "reannotate": {"every": 5, "annotate": {"tasks": 3, "gamma": 0.9}}},
            "rl.reannotate.annotate needs undiscounted values",
        ),
        (
            {"imitation": {"ratio": 1.0}, "reannotate": {"every": 5, "annotate": {"q_model": {}}}},
            "rl.reannotate.annotate.q_model has no effect: nothing reads it during rl",
        ),
        (
            {"imitation": {"ratio": 1.0}, "reannotate": {"every": 5, "annotate": {"judge_model": {"kind": "reward"}}}},
            "rl.reannotate.annotate.judge_model has no effect: nothing reads it during rl",
        ),
        (
            {"credit": {"kind": "annotated"}, "reannotate": {"every": 5, "annotate": {"value_model": {"rollouts": True}}}},
            "rl.reannotate.annotate.value_model.rollouts has no effect: nothing reads it during rl",
        ),
        (
            {"credit": {"kind": "annotated"}, "reannotate": {"every": 5, "annotate": {"labels": {"pool": False}}}},
            "rl.reannotate.annotate.labels.pool has no effect: nothing reads it during rl",
        ),
        (
            {"imitation": {"ratio": 1.0}, "reannotate": {"every": 5, "annotate": {"value_model": {}}}},
            "rl.reannotate.annotate.value_model has no effect: only credit.kind: annotated reads it",
        ),
        (
            {"imitation": {"ratio": 1.0}, "reannotate": {"every": 5, "annotate": {"tasks": 3, "evaluation": {"kind": "mixed"}}}},
            "rl.reannotate.annotate.evaluation.kind is mixed",
        ),
    ],
)
def test_invalid_settings_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError) as error:
        parse_params({"domains": ["toy"], "per_domain": {"toy": {"rl": section}}, "annotate": {"tasks": 48}})
    assert message in str(error.value)
