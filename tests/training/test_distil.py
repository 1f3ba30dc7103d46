"""merge.method distil: one policy learns from the successes of all specialists."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import merge
from stages.agent.instructions import write_instruction
from stages.agent.policy import load_policy
from stages.curation.panel import Panel
from stages.evaluation import panels
from stages.merging.contract import MergeError
from stages.merging.registry import bind
from stages.merging.streaming import merge_folders
from stages.records.episode import Episode, TurnRecord, read_tasks
from stages.records.task import Split
from stages.runtime.resources import Resources
from stages.runtime.stage import StageContext
from stages.training import distillation
from stages.training.distillation import distinct_successes
from training.toys import FirstLetterEnvironment, KilledError, kill_at_step, outputs

DISTIL = {"attempts": 8, "keep": 2, "epochs": 6.0, "learning_rate": 0.01, "batch_tokens": 256, "sampling": {"max_tokens": 3}}
Make = Callable[..., StageContext]


@pytest.fixture
def make(make_context: Make, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make(name, **distil): two toy domains, whose specialists are the tiny policy, which succeeds now and then."""
    domain = SimpleNamespace(make=FirstLetterEnvironment.in_folder, settings=SimpleNamespace(constraint=None))

    def load(curated: Path, domains: list[str], split: Split) -> dict[str, Panel]:
        return {one: Panel(one, tuple(read_tasks(curated / one / "tasks.parquet", split)), {}, {}) for one in domains}

    monkeypatch.setattr(distillation, "load_panels", load)
    monkeypatch.setattr(panels, "load_domain", lambda name, settings: domain)

    def made(name: str, lora: int = 0, **distil: Any) -> StageContext:
        names = ["toy", "other"]
        context = make_context(
            "merge",
            name,
            domains=names,
            per_domain={one: {} for one in names},
            merge={"method": "distil", "distil": {**DISTIL, **distil}},
            model={"path": str(tiny_policy), "max_length": 128, "lora": {"rank": lora}},
        )
        if not (context.data / "curated/other").exists():
            shutil.copytree(context.data / "curated/toy", context.data / "curated/other")
            for folder in ("sft", "rl/toy", "rl/other"):
                shutil.copytree(tiny_policy, context.data / "models" / folder)
        return context

    return made


def distilled(context: StageContext) -> dict[str, Any]:
    merge.run(context)
    return json.loads((context.reports / "merge.json").read_text())


def test_the_policy_learns_the_specialists_successes(make: Make) -> None:
    context = make("run")
    report = distilled(context)
    assert report["method"] == report["requested"] == "distil"
    found = report["distil"]
    for of_domain in found["domains"].values():
        assert of_domain["episodes"] == 12 * 8
        assert of_domain["environment_steps"] == 2 * of_domain["episodes"], "two actions each"
        assert 0 < of_domain["successes"] < of_domain["episodes"]
        assert 0 < of_domain["learnt"] <= 12 * 2
    losses = context.tracker.metrics["distil/train_loss"]
    assert len(losses) == found["steps"]
    learnt = sum(of_domain["learnt"] for of_domain in found["domains"].values())
    assert found["trained_tokens"] >= 6 * 2 * learnt, "six epochs of at least two actions each"
    assert losses[-1] < 0.7 * losses[0]
    before, after = load_policy(context.data / "models/sft"), load_policy(context.data / "models/merged")
    assert before.hash != after.hash
    again = json.loads((context.reports / "merge.json").read_text())["diagnostics"]
    assert set(again["models"]) == {"toy", "other"}


@pytest.mark.parametrize(("step", "lora"), [pytest.param(3, 0, marks=pytest.mark.slow), (5, 4)])
def test_resume_after_kill_writes_the_same_bytes(make: Make, monkeypatch: pytest.MonkeyPatch, step: int, lora: int) -> None:
    monkeypatch.setattr(distillation, "CHECKPOINT_EVERY", 2)
    plain = make("plain", lora)
    merge.run(plain)
    killed = make("killed", lora)
    kill_while_distilling(killed, step)
    with pytest.raises(KilledError):
        merge.run(killed)
    monkeypatch.setattr(distillation, "play", None)  # what was played is not played again
    merge.run(make("killed", lora))
    assert outputs(killed.root) == outputs(plain.root)
    load_policy(plain.data / "models/merged")


def kill_while_distilling(context: StageContext, step: int) -> None:
    of_others = context.progress
    kill_at_step(context, step)
    dying = context.progress
    context.progress = lambda label, *rest: (dying if label == "distilling" else of_others)(label, *rest)  # type: ignore[method-assign]


def episode(task: str, attempt: int, reward: float, *actions: str) -> Episode:
    turns = [TurnRecord(action, "", True, 0.0, 0.0, "", action, 0, 0) for action in actions]
    name = f"{task}/{attempt:04d}"
    return Episode(name, task, "toy", task, 0, "", "", 1.0, 1.0, 0, turns=turns, reward=reward, terminated=True)


def test_successes_with_different_actions_are_kept() -> None:
    episodes = [
        episode("b", 0, 1.0, "go"),
        episode("a", 3, 1.0, "take", "go"),
        episode("a", 0, 0.0, "look"),
        episode("a", 1, 1.0, "go"),
        episode("a", 2, 1.0, "go"),
        episode("a", 4, 1.0, "open"),
    ]
    assert [one.episode_id for one in distinct_successes(episodes, 2)] == ["a/0001", "a/0003", "b/0000"]
    assert [one.episode_id for one in distinct_successes(episodes, 1)] == ["a/0001", "b/0000"]


def test_without_successes_nothing_is_learnt(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_played", lambda *arguments: [episode("a", 0, 0.0, "look")])
    with pytest.raises(ValueError, match="no specialist solved a training task"):
        merge.run(make("run"))


def test_specialists_with_an_instruction_are_refused(make: Make) -> None:
    context = make("run")
    write_instruction(context.data / "models/rl/other", "other", "Be brief. {question}")
    with pytest.raises(ValueError, match="the specialist of other plays in a team or by an instruction of its own"):
        merge.run(context)


def test_episodes_without_tokens_are_refused(make: Make) -> None:
    context = make("run")
    engine = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "text": True}
    resources = Resources.model_validate({**context.params.resources.model_dump(), "engine": engine})
    with pytest.raises(ValueError, match=r"merge.method distil learns the tokens of episodes, which resources.engine.text: true"):
        merge.run(replace(context, params=context.params.model_copy(update={"resources": resources})))


def test_folders_are_not_merged_by_a_method_that_trains(tmp_path: Path, tiny_policy: Path) -> None:
    with pytest.raises(MergeError, match="distil trains a policy on episodes; run it as the stage merge"):
        merge_folders("distil", [tiny_policy] * 2, tiny_policy, tmp_path / "out", bind("distil", (1.0, 1.0)), seed=0)
