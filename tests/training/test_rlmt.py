"""RLMT by its name: a preference model scores the response, the loss covers the thought, and both run through a kill."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import rl
from stages.agent.settings import Model, Rollout
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.loss import kl_estimate, ppo_clip
from stages.algorithms.parts.reward import EpisodeRewards
from stages.algorithms.resolve import contradictions, resolve_section
from stages.algorithms.settings import Rl
from stages.annotation.settings import Annotate
from stages.judging.extraction import MISSING
from stages.records.episode import read_rows
from stages.records.thinking import Thinking
from stages.training.common.batches import trajectory_batch
from training.toys import SHORT_RUN, KilledError, kill_at_step, make_episode, outputs, read_history

RLMT: dict[str, Any] = {**SHORT_RUN, "algorithm": "rlmt", "judge": {"local": {"options": ["a", "b"]}}}


@pytest.fixture
def context_of(make_context, tiny_policy: Path):
    """A context of a thinking policy in which annotate has fitted a reward model. The marker is a word that the policy knows."""

    def make(name: str, thinking: dict[str, str], **section: Any) -> Any:
        model = {"path": str(tiny_policy), "max_length": 128, "thinking": thinking}
        judge_model = {"kind": "reward", "options": ["a", "b"]}
        sections = {"rl": {**RLMT, **section}, "annotate": {"judge_model": judge_model}, "model": model}
        context = make_context("rl", name, **sections)
        folder = context.root / "data/annotated/toy/judge_model"
        if not folder.exists():
            folder.parent.mkdir(parents=True)
            folder.symlink_to(tiny_policy)
        return context

    return make


def test_by_its_name_a_strict_judge_reads_no_thoughts_and_the_run_resumes(context_of) -> None:
    """A random policy writes no marker, so every answer is missing."""
    marks = {"start": "<think>", "end": "</think>"}
    whole = context_of("whole", marks)
    rl.run(whole)
    assert json.loads((whole.root / "reports/rl/toy.json").read_text())["algorithm"] == "rlmt"
    rows = read_rows(whole.root / "data/rl/toy/judgments.parquet")
    assert {answer for row in rows for answer in row["answers"]} == {MISSING}
    for row in read_history(whole.root):
        assert (row["judge_response_rate"], row["judge_response_words"]) == (0, 0)
    cut = context_of("cut", marks)
    kill_at_step(cut, 2)
    with pytest.raises(KilledError):
        rl.run(cut)
    cut = context_of("cut", marks)
    rl.run(cut)
    assert outputs(cut.root) == outputs(whole.root)


def test_a_lenient_judge_reads_everything(context_of) -> None:
    judge = {**RLMT["judge"], "extract": {"strict": False}}
    context = context_of("lenient", {"start": "<think>", "end": "</think>"}, steps=1, judge=judge)
    rl.run(context)
    rows = read_rows(context.root / "data/rl/toy/judgments.parquet")
    assert MISSING not in {answer for row in rows for answer in row["answers"]}
    (row,) = read_history(context.root)
    assert (row["judge_response_rate"], row["judge_thought_words"]) == (0, 0), "what is read has no marker"


@pytest.mark.parametrize("strict", [True, False])
def test_a_thought_without_an_end_is_no_response(context_of, strict: bool, capsys) -> None:
    """Contract: of episodes that end before the environment terminates, a strict judge reads that the response is missing and a
    lenient one the whole message; neither counts as a response, and a marker that nobody writes is reported at once."""
    judge = {**RLMT["judge"], "extract": {"strict": strict}}
    horizon = {"kind": "fixed", "turns": 1}
    context = context_of("cut", {"start": "<think>", "end": "</think>"}, steps=1, judge=judge, horizon=horizon)
    rl.run(context)
    answers = [row["answers"][0] for row in read_rows(context.root / "data/rl/toy/judgments.parquet")]
    assert (set(answers) == {MISSING}) is strict
    assert strict or all(answers)
    (row,) = read_history(context.root)
    assert row["judge_response_rate"] == 0
    assert "no episode of the first step has a response between the markers of rl.judge.extract" in capsys.readouterr().err


@pytest.mark.parametrize("strict", [True, False])
def test_the_rate_of_responses_is_that_of_their_marker(context_of, strict: bool, capsys) -> None:
    """A marker that the tiny policy writes by chance: the share of messages with text after it, also for a lenient judge."""
    judge = {**RLMT["judge"], "extract": {"marker": "e", "strict": strict}}
    context = context_of("rate", {"start": "<think>", "end": "</think>"}, steps=1, judge=judge)
    rl.run(context)
    samples = read_rows(context.root / "data/rl/toy/samples.parquet")
    last = [[one["content"] for one in row["messages"] if one["role"] == "assistant"][-1] for row in samples]
    with_response = [text for text in last if text.rpartition("e")[2].strip() and "e" in text]
    assert 0 < len(with_response) < len(last)
    (row,) = read_history(context.root)
    assert row["judge_response_rate"] == pytest.approx(len(with_response) / len(last))
    assert "no episode" not in capsys.readouterr().err


def method(**section: Any):
    return resolve(Rl.model_validate({"algorithm": "rlmt", **section}), 64)


def test_advantages_cover_thoughts_and_are_groups_of_k_minus_1() -> None:
    """R = (1, 0, 0, 1): +-0.866 on every policy token, those of thoughts included; equal rewards: 0."""
    for rewards, expected in (([1.0, 0.0, 0.0, 1.0], [0.866, -0.866, -0.866, 0.866]), ([1.0] * 4, [0.0] * 4)):
        batch = trajectory_batch([make_episode(f"e{place}", "g", [5], 0.0) for place in range(4)])
        scored = method().prepare(method().shape(batch.with_extra(EpisodeRewards(torch.tensor(rewards)))))
        assert scored.advantages is not None
        rows = scored.advantages[batch.mask].reshape(4, 5)
        assert rows.tolist() == [pytest.approx([value] * 5, abs=1e-3) for value in expected]


def test_dual_clip_and_kl() -> None:
    """Ratio 4 and A = -1: loss 3, not 4. log pi - log pi_ref = 0.1: k3 = 0.004837."""
    found = method().rl.loss
    batch = trajectory_batch([make_episode("e", "g", [1], 0.0)])
    batch = batch.with_(advantages=-1.0 * batch.mask)
    loss = ppo_clip(batch.logprobs_old + math.log(4.0), batch, found)
    assert float(loss[batch.mask]) == pytest.approx(3.0)
    assert float(kl_estimate(torch.tensor(0.1), torch.tensor(0.0), found.kl_estimator)) == pytest.approx(0.004837, abs=1e-6)


def test_parts_of_the_method() -> None:
    found = method().rl
    assert (found.loss.kl_coef, found.loss.entropy_coef, found.loss.dual_clip) == (0.001, 0.001, 3.0)
    assert found.judge.extract is not None
    assert (found.judge.extract.occurrence, found.judge.extract.strict) == (None, True)


@pytest.mark.parametrize(
    ("extract", "thinking", "says"),
    [(None, None, "model.thinking is null"), ({"marker": ""}, None, None), (None, Thinking(), None)],
)
def test_a_marker_is_needed(extract: dict[str, Any] | None, thinking: Thinking | None, says: str | None) -> None:
    judge = {} if extract is None else {"extract": extract}
    resolved = resolve_section(Rl.model_validate({"algorithm": "rlmt", "judge": judge}), 128)
    fitted = Annotate.model_validate({"judge_model": {"kind": "reward"}})
    sections = {"annotate": fitted, "model": Model(thinking=thinking), "rollout": Rollout(tasks=96)}
    problems = " ".join(contradictions(*resolved, partial(dict.__getitem__, sections)))
    assert (says in problems) if says else not problems
