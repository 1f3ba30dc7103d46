"""rl where the policy writes results of its own searches: who wrote a token is recorded while it is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from stages import rl
from stages.environments.protocol import Step
from stages.records.episode import Owner, read_rows
from training.toys import SHORT_RUN, FirstLetterEnvironment, KilledError, kill_at_step, outputs, read_history

RL = {**SHORT_RUN, "algorithm": "ssrl"}


class WritingEnvironment(FirstLetterEnvironment):
    """The first action stands for a result, and is one if the environment was told how likely it was."""

    told: tuple[float, ...] | None = None

    def drawn(self, logprobs: list[float]) -> None:
        self.told = tuple(logprobs)

    def step(self, action: str) -> Step:
        step, first = super().step(action), self.actions == 1
        terms = {"exact_match": step.reward, "format_graded": float(step.terminated), "self_written": float(first)}
        assert self.told is not None, "log-probabilities come before the action"
        assert all(one <= 0 for one in self.told)
        assert len(action.split()) > 1 or not self.told, "they are of what follows the verb"
        self.told = None
        return Step(step.observation, step.reward, True, step.terminated, False, 0.0, terms, evidence=first)


def run(make_context: Any, name: str, killed_at: int | None = None, **changes: Any) -> Any:
    context = make_context("rl", name, rl={**RL, **changes})
    if killed_at is not None:
        kill_at_step(context, killed_at)
        with pytest.raises(KilledError):
            rl.run(context)
        context = make_context("rl", name, rl={**RL, **changes})
    rl.run(context)
    return context


def test_evidence_is_recorded_left_out_of_the_loss_and_resumes_to_the_same_bytes(
    make_context: Any, monkeypatch: pytest.MonkeyPatch, tiny_policy: Any
) -> None:
    """Contract: the tokens of a turn that stood for a result are the policy's evidence, have log-probabilities, and are trained
    on with loss.evidence include alone."""
    made = SimpleNamespace(make=lambda folder: WritingEnvironment(), settings=SimpleNamespace(max_turns=2))
    monkeypatch.setattr(rl, "open_domain", lambda *_: made)
    plain = run(make_context, "plain")
    assert outputs(run(make_context, "killed", killed_at=2).root) == outputs(plain.root)
    for row in read_rows(plain.root / "data/rl/toy/samples.parquet"):
        first, second = row["turns"]
        assert set(row["owner"][first["start"] : first["end"]]) == {Owner.EVIDENCE}
        assert set(row["owner"][second["start"] : second["end"]]) == {Owner.POLICY}
        assert all(row["logprob"][first["start"] : first["end"]])
        assert not any(row["advantages"][first["start"] : first["end"]])
    assert all(row["self_written"] == 1.0 for row in read_history(plain.root))
    included = run(make_context, "included", loss={"evidence": "include"})
    models = [load_file(one.root / "data/models/rl/toy/model.safetensors") for one in (plain, included)]
    assert any(not models[0][name].equal(models[1][name]) for name in models[0])
