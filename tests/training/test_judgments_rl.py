"""rl with rewards for judgments: ReSeek in the stage."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from stages import rl
from stages.environments.protocol import Step
from stages.records.task import JUDGMENT_TERMS
from training.toys import FirstLetterEnvironment, read_history

RL: dict[str, Any] = {
    "algorithm": "reseek",
    "steps": 2,
    "tasks_per_step": 2,
    "group_size": 4,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "sampling": {"max_tokens": 3},
}


class JudgingEnvironment(FirstLetterEnvironment):
    """The first action is a judgment, right if it starts with a letter before `n`; nothing else is rewarded."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        right = "a" <= action[:1].lower() < "n"
        terms = (
            {"judge_true_accept" if right else "judge_false_accept": 1.0}
            if self.actions == 1
            else dict.fromkeys(JUDGMENT_TERMS, 0.0)
        )
        return Step(step.observation, 0.0, True, step.terminated, False, 1.0, terms)


def run(make_context: Any, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]) -> Any:
    made = SimpleNamespace(make=lambda folder: JudgingEnvironment(), settings=SimpleNamespace(max_turns=2))
    monkeypatch.setattr(rl, "open_domain", lambda *_: made)
    context = make_context("rl", name, rl={**RL, "settings": settings})
    rl.run(context)
    return context


def test_judgments_alone_train_the_policy(make_context: Any, monkeypatch: pytest.MonkeyPatch, tiny_policy: Any) -> None:
    """Contract: rewards of single turns reach the loss with only `rl.algorithm` set; success stays the environment's."""
    context = run(make_context, monkeypatch, "judged", {})
    trained, start = (load_file(folder / "model.safetensors") for folder in (context.root / "data/models/rl/toy", tiny_policy))
    assert any(not trained[tensor].equal(start[tensor]) for tensor in start)
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert (report["algorithm"], report["ledger/environment_tokens_trained"]) == ("reseek", 0)
    rows = read_history(context.root)
    assert [row["judgments"] for row in rows] == [1.0, 1.0]
    assert [row["success"] for row in rows] == [0.0, 0.0]
    assert any(row["judge_reward"] for row in rows)


def test_without_their_rewards_nothing_is_learnt(make_context: Any, monkeypatch: pytest.MonkeyPatch, tiny_policy: Any) -> None:
    context = run(make_context, monkeypatch, "plain", {"match": 0.0, "false_accept": 0.0, "false_reject": 0.0})
    trained, start = (load_file(folder / "model.safetensors") for folder in (context.root / "data/models/rl/toy", tiny_policy))
    assert all(trained[tensor].equal(start[tensor]) for tensor in start)


def test_other_domains_are_refused(make_context: Any) -> None:
    with pytest.raises(ValueError, match=r"per_domain\.search\.environment\.judge"):
        rl.run(make_context("rl", "refused", rl=RL))
