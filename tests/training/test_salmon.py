"""SALMON by its name: PPO on a reward model that reads principles, which may begin while rl runs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import rl
from stages.agent.policy import load_policy
from stages.agent.settings import Model, Rollout
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.loss import kl_estimate
from stages.algorithms.resolve import contradictions, resolve_section
from stages.algorithms.settings import Rl
from stages.annotation.settings import Annotate
from stages.judging.local import LocalJudge
from stages.judging.settings import LocalParams
from stages.records.episode import read_rows
from stages.runtime.validation import ParamsError
from stages.training.rl.critic import Critic, clipped_errors, reward_start
from stages.values.settings import HeadParams
from training.toys import SHORT_RUN, KilledError, kill_at_step, outputs, read_history

SALMON: dict[str, Any] = {
    **SHORT_RUN,
    "algorithm": "salmon",
    "critic": {"warmup_steps": 1},
    "judge": {"local": {"options": ["a", "b"]}},
}
MODEL = {"kind": "reward", "options": ["a", "b"], "principles": {}}


@pytest.fixture
def context_of(make_context, tiny_policy: Path):
    """A context in which annotate has fitted a judge model."""

    def make(name: str, **section: Any) -> Any:
        context = make_context("rl", name, rl={**SALMON, **section}, annotate={"judge_model": MODEL})
        folder = context.root / "data/annotated/toy/judge_model"
        if not folder.exists():
            folder.parent.mkdir(parents=True)
            folder.symlink_to(tiny_policy)
        return context

    return make


def test_by_its_name_it_reads_annotates_model_and_resumes_to_the_same_bytes(context_of) -> None:
    whole = context_of("whole")
    rl.run(whole)
    report = json.loads((whole.root / "reports/rl/toy.json").read_text())
    assert report["algorithm"] == "salmon"
    assert report["judge"]["judge"] == "local"
    rows = read_rows(whole.root / "data/rl/toy/judgments.parquet")
    assert len(rows) == 3 * 12
    for row in read_history(whole.root):
        assert row["judge_short"] < 0, "attributes of the answers are in the history"
        assert row["judge_modest"] == 0
    cut = context_of("cut")
    kill_at_step(cut, 2)
    with pytest.raises(KilledError):
        rl.run(cut)
    cut = context_of("cut")
    rl.run(cut)
    assert outputs(cut.root) == outputs(whole.root)


def test_reward_is_the_scalar_with_its_terms(context_of, monkeypatch) -> None:
    """R = 10 (r + 5 min(0.8, length / longest) - 6 [did not stop]); here without a bonus, of an answer cut at 3 tokens."""
    from stages.training.rl.judging import EpisodeJudge

    seen: list[tuple[float, float, bool]] = []
    shape = EpisodeJudge._shaped

    def record(self: EpisodeJudge, reward: float, episode: Any) -> float:
        made, last = shape(self, reward, episode), episode.turns[-1]
        seen.append((reward, made, episode.token_ids[last.end - 1] == self.chat.end_of_turn))
        return made

    monkeypatch.setattr(EpisodeJudge, "_shaped", record)
    context = context_of("shaped", steps=2, judge={"local": {"options": ["a", "b"]}, "length_bonus": {"longest": 1_000_000}})
    rl.run(context)
    assert {stopped for _, _, stopped in seen} >= {False}
    for reward, made, stopped in seen:
        assert made == pytest.approx(10 * (reward - (0.0 if stopped else 6.0)), abs=1e-2)


def test_a_principle_that_begins_later_is_read_from_then_on(context_of, monkeypatch) -> None:
    from stages.training.rl.judging import EpisodeJudge

    read: dict[int, set[str]] = {}
    grouped = EpisodeJudge._group

    def record(self: EpisodeJudge, episodes: Any) -> Any:
        found = grouped(self, episodes)
        read.setdefault(self._step + 1, set()).update(found.principles)
        return found

    monkeypatch.setattr(EpisodeJudge, "_group", record)
    items = [
        {"name": "correct", "text": "right", "negative": "wrong"},
        {"name": "modest", "text": "no praise", "negative": "praise", "always": True, "from_step": 3},
    ]
    rl.run(context_of("later", judge={"local": {"options": ["a", "b"]}, "principles": {"items": items}}))
    assert read == {1: {"right"}, 2: {"right"}, 3: {"right", "no praise"}}


def test_a_program_judges_by_the_attributes_that_principles_name(make_context) -> None:
    section = {**SHORT_RUN, "steps": 1, "reward": {"kind": "judge"}}
    exact = {"noise": 0.0, "pointwise_gain": 1.0, "pointwise_centre": 0.0}
    items = [{"name": "short", "text": "short", "negative": "long"}]
    context = make_context("rl", rl={**section, "judge": {"program": exact, "principles": {"items": items}}})
    rl.run(context)
    for row in read_rows(context.root / "data/rl/toy/judgments.parquet"):
        assert row["scores"][0] == pytest.approx(-len(row["answers"][0].split()) / 5)
    unknown = [{"name": "polite", "text": "polite", "negative": "rude"}]
    context = make_context("rl", "unknown", rl={**section, "judge": {"principles": {"items": unknown}}})
    with pytest.raises(ValueError, match=r"rl\.judge\.principles names 'polite'.*known: correct, modest, short"):
        rl.run(context)


def test_kl_counts_only_where_the_policy_is_likelier() -> None:
    found = kl_estimate(torch.tensor([0.0, 0.0]), torch.tensor([-1.0, 1.0]), "k1_positive")
    assert found.tolist() == [1.0, 0.0]


def test_it_is_ppo_on_the_model_s_scalar() -> None:
    found = resolve(Rl.model_validate(SALMON), 128).rl
    assert (found.advantage.estimator, found.advantage.lam, found.advantage.gamma) == ("gae", 1.0, 1.0)
    assert (found.reward.kl_coef, found.reward.kl_estimator) == (10 * 0.01, "k1_positive"), "the factor 10 is on all rewards"
    assert found.judge.raw
    assert (found.judge.scale, found.judge.unfinished_penalty) == (10.0, 6.0)
    assert (found.critic.init, found.critic.value_clip) == ("judge_model", 0.2)


def test_the_critic_starts_with_the_reward_model_s_scalar(tiny_policy: Path) -> None:
    """Its value before a token is judge.scale times the log-odds of the options there."""
    policy = load_policy(tiny_policy)
    head = HeadParams(loss="mse")
    critic = Critic(policy.model, head, start=reward_start(tiny_policy, ["a", "b"], 10.0, head, "cpu"))
    ids = torch.tensor([policy.tokenizer("some words here")["input_ids"]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    judge = LocalJudge(policy, LocalParams(options=["a", "b"]), 64, logits=True)
    expected = [10 * judge.log_odds([ids[0, :end].tolist()]).item() for end in range(1, ids.shape[1])]
    assert critic.values(ids, mask)[0, 1:].tolist() == pytest.approx(expected, abs=1e-4)


def test_clipped_errors_by_hand() -> None:
    """From v_old = 0 with clip 0.2: moving past the clip towards R earns nothing, overshooting away from it is paid in full."""
    values = torch.tensor([0.1, 0.5, -0.5, 1.0], requires_grad=True)
    found = clipped_errors(values, torch.zeros(4), torch.ones(4), 0.2)
    assert found.tolist() == pytest.approx([0.81, 0.64, 2.25, 0.64])
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1.8, 0.0, -3.0, 0.0])


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"critic": {"init": "policy", "head": {"loss": "hl_gauss", "v_min": -100, "v_max": 100}}},
            "value_clip is of the squared",
        ),
        (
            {"algorithm": "ppo", "critic": {"huber_delta": 1.0, "head": {"loss": "hl_gauss", "v_min": -100, "v_max": 100}}},
            "critic.huber_delta",
        ),
        ({"algorithm": "marft", "critic": {"value_clip": 0.0, "distribution": {}}}, "huber_delta is of the squared"),
        ({"judge": {"kind": "program"}}, "init: judge_model starts from the reward model"),
        ({"judge": {"local": {"path": "models/mine"}}}, r"without a local\.path"),
        ({"critic": {"value_clip": 0.0, "distribution": {}}}, "a reward model's scalar"),
    ],
)
def test_critics_that_cannot_start_are_refused(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ParamsError, match=says):
        resolve_section(Rl.model_validate({"algorithm": "salmon", **section}), 128)


@pytest.mark.parametrize(
    ("section", "model", "says"),
    [
        ({}, {}, r"judge_model\.kind is none: set that to reward"),
        ({}, {"kind": "comparison", "principles": {}}, "set that to reward"),
        ({"algorithm": "arena_rl", "judge": {"kind": "local"}}, {"kind": "reward"}, "set that to comparison"),
        ({}, {"kind": "reward", "options": ["c", "d"], "principles": {}}, "make them equal"),
        ({}, {"kind": "reward"}, r"judge_model\.principles is null"),
        ({"judge": {"local": {"path": "hub:a/b"}}, "critic": {"init": "policy"}}, {}, "download the model first"),
        ({"algorithm": "rlmt"}, {"kind": "reward", "principles": {}}, "learnt to judge by principles alone"),
        ({"algorithm": "rlmt", "judge": {"scheme": "checklist"}}, {"kind": "reward"}, "learnt to score whole answers"),
        ({"algorithm": "rlmt", "judge": {"criteria": ["depth"]}}, {"kind": "reward"}, "rl.judge.criteria are ['depth']"),
        ({"algorithm": "rlmt", "judge": {"references": True}}, {"kind": "reward"}, "learnt without one"),
    ],
)
def test_models_that_do_not_fit_are_refused(section: dict[str, Any], model: dict[str, Any], says: str) -> None:
    method, found = resolve_section(Rl.model_validate({"algorithm": "salmon", **section}), 128)
    sections = {"annotate": Annotate.model_validate({"judge_model": model}), "model": Model(), "rollout": Rollout()}
    problems = " ".join(contradictions(method, found, partial(dict.__getitem__, sections)))
    assert says.replace("\\", "") in problems


@pytest.mark.parametrize(
    ("judge", "says"),
    [
        ({"kind": "program", "raw": True}, "judge.kind: local"),
        ({"scheme": "anchor", "length_bonus": {}}, "scheme"),
        ({"scheme": "checklist", "items": ["a"], "kind": "server", "server": {"model": "m"}, "principles": {}}, "checklist"),
    ],
)
def test_keys_without_effect_are_refused(judge: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolve(Rl.model_validate({"reward": {"kind": "judge"}, "judge": judge}), 128)
