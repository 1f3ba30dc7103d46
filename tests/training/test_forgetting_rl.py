"""rl on episodes that forget: the loss is of what each turn saw."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from stages import rl
from stages.algorithms.algorithm import resolve
from stages.algorithms.domains import check_domain
from stages.algorithms.settings import Rl
from stages.environments.protocol import Observation, Step
from stages.params import check_domains, parse_params
from stages.records.episode import read_rows
from stages.runtime.validation import ParamsError
from stages.training.common import hidden
from training.toys import SHORT_RUN, FirstLetterEnvironment, KilledError, kill_at_step, outputs, read_history

RL = {**SHORT_RUN, "epochs": 2, "minibatches": 2, "loss": {"kind": "ppo_clip", "kl_coef": 0.01}, "algorithm": "grpo"}


class ForgettingEnvironment(FirstLetterEnvironment):
    """Four actions; the second and the third hide what was seen before them."""

    def step(self, action: str) -> Step:
        self.actions += 1
        over = self.actions == 4
        reward = float(over and "a" <= action[:1].lower() < "n")
        text = "" if over else f"you see a key behind door {self.actions} of the long corridor"
        return Step(Observation(text), reward, True, over, False, 1.0, {"letter": reward}, forgets=int(1 < self.actions < 4))


def run(make_context: Any, monkeypatch: pytest.MonkeyPatch, name: str, killed_at: int | None = None, **sections: Any) -> Any:
    made = SimpleNamespace(make=lambda folder: ForgettingEnvironment(), settings=SimpleNamespace(max_turns=4))
    monkeypatch.setattr(rl, "open_domain", lambda *_: made)
    values = {"rl": RL, "model": {"path": str(make_context.tiny), "max_length": 400}, **sections}
    context = make_context("rl", name, **values)
    if killed_at is not None:
        kill_at_step(context, killed_at)
        with pytest.raises(KilledError):
            rl.run(context)
        context = make_context("rl", name, **values)
    rl.run(context)
    return context


@pytest.fixture
def contexts(make_context: Any, tiny_policy: Any) -> Any:
    def made(*given: Any, **sections: Any) -> Any:
        return make_context(*given, **sections)

    made.tiny = tiny_policy  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("share", [True, False])
def test_policies_are_trained_on_what_they_saw(contexts: Any, monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    """Contract: ratios are 1 in a step's first update, every token is trained once per epoch, and a killed run ends with the same
    bytes."""
    settings = {"rl": {**RL, "share_prefixes": share}}
    plain = run(contexts, monkeypatch, "plain", **settings)
    report = json.loads((plain.root / "reports/rl/toy.json").read_text())
    assert report["max_logprob_difference"] < 1e-5
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["ledger/policy_tokens_trained"] > 0
    samples = read_rows(plain.root / "data/rl/toy/samples.parquet")
    assert {tuple(map(tuple, row["forgotten"])) for row in samples} == {((0, 1), (1, 2))}
    assert all(row["success"] == row["reward_mean"] for row in read_history(plain.root))
    if share:
        assert outputs(run(contexts, monkeypatch, "killed", killed_at=2, **settings).root) == outputs(plain.root)


def test_reading_whole_rows_would_be_noticed(contexts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard on log-probabilities tells of a training pass that sees what the policy did not."""
    monkeypatch.setattr(hidden, "with_spans", lambda batch, episodes: batch)
    monkeypatch.setattr("stages.training.common.batches.with_spans", lambda batch, episodes: batch)
    with pytest.raises(ValueError, match="sampling and training log-probs differ by"):
        run(contexts, monkeypatch, "whole")


@pytest.mark.usefixtures("other_precision")
def test_mixed_precision_compares_with_the_same_views(contexts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"resources": {"slots": 16, "threads": 1, "tokens_per_batch": 512, "precision": "bfloat16"}}
    context = run(contexts, monkeypatch, "mixed", **settings)
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["max_rescored_difference"] < 1e-4
    start = load_file(contexts.tiny / "model.safetensors")
    trained = load_file(context.root / "data/models/rl/toy/model.safetensors")
    assert any(not trained[name].float().equal(start[name].float()) for name in start)


HARD = {"judge": {"context": "hard"}, "max_turns": 12}


def check(**sections: Any) -> None:
    trees = {"tasks": 48, **sections.pop("annotate", {})}
    per_domain = {"search": {"environment": HARD}}
    stages = {"rollout": {"tasks": 96}, "annotate": trees}
    check_domains(parse_params({"domains": ["search"], "per_domain": per_domain, **stages, **sections}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rl": {"algorithm": "dpo"}}, "rl.algorithm: dpo learns from whole histories"),
        ({"rl": {"algorithm": "archer"}}, "rl.advantage.estimator: utterance continues whole histories"),
        ({"rl": {"algorithm": "marft"}}, "rl.advantage.estimator: team plays conversations that keep everything"),
        ({"rl": {"algorithm": "opsd"}}, "the teacher of rl.algorithm: opsd reads whole histories"),
        ({"rl": {"warm_start": {"algorithm": "step_dpo"}}}, "rl.warm_start learns from whole histories"),
        ({"annotate": {"q_model": {"kind": "step_dpo"}}}, "annotate.q_model.kind fits a model to whole histories"),
        ({"annotate": {"evaluation": {"kind": "mixed"}}}, "annotate.evaluation.kind fits a model to whole histories"),
        ({"evaluate": {"scaffold": {"window": 2}}}, "evaluate.scaffold.window counts exchanges"),
        ({"evaluate": {"scaffold": {"think": "reflect"}}}, "evaluate.scaffold.think: reflect puts turns between steps"),
        ({"resources": {"engine": {"kind": "openai", "text": True}}}, "resources.engine.text: true sends conversations as text"),
    ],
)
def test_what_reads_whole_histories_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        check(**sections)


def test_methods_that_read_what_turns_saw_are_not() -> None:
    for algorithm in ("reseek", "grpo", "ppo", "tree_bc", "bon_sft", "arpo"):
        check(rl={"algorithm": algorithm})
    method, section = resolve(Rl(algorithm="dpo")).method, resolve(Rl(algorithm="dpo")).rl
    check_domain(method, section, SimpleNamespace(name="x", settings=SimpleNamespace()))
