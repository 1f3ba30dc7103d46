"""Models that the annotate stage fits: of values, actions and progress, and of the environment."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slow import slow_except
from toy_annotation import VALUES, Toy, outputs, tasks

from stages import annotate
from stages.agent.policy import load_policy
from stages.annotation.search import Search
from stages.params import parse_params
from stages.records.episode import read_json, read_rows, write_json, write_tasks
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.stage import StageContext


def test_stage_fits_q_model_and_progress_estimator_if_configured(context: StageContext):
    """Contract: a Q-model and a progress estimator are fitted reproducibly, byte for byte, and evaluated on held-out tasks; by
    default q_model.json says that there is none."""
    from stages.records.episode import Episode, Owner, TurnRecord, write_episodes
    from stages.values.progress import ProgressEstimator
    from stages.values.q_model import load_q_model

    small = {**VALUES["annotate"], "iterations": 6}
    annotate.run(replace(context, params=parse_params({**VALUES, "annotate": small})))
    assert read_json(context.data / "models/q/toy/q_model.json") == {"params": {"kind": "none"}}
    assert not (context.data / "annotated/toy/progress_model").exists()
    episodes = []
    for number in range(12):
        episode = Episode(f"e{number:02d}", f"t{number % 4:02d}", "toy", "g", 0, "", "", 1.0, 1.0, 0, reward=float(number % 2))
        episode.append([1, 5, 6 + number % 2], Owner.PROMPT, -1)
        episode.append([7, 3], Owner.POLICY, 0, [-1.0, -1.0])
        episode.turns.append(TurnRecord("a", "", True, episode.reward, 0.0, "", "a", 3, 5))
        episodes.append(episode)
    write_episodes(context.data / "rollouts/toy/episodes.parquet", episodes)
    written = []
    for kind in ("step_dpo", "regression", "trajectory_dpo", "step_dpo"):
        changes = {"q_model": {"kind": kind, "epochs": 1.0}, "progress": {"kind": "spa", "epochs": 1.0}}
        params = parse_params({**VALUES, "annotate": {**small, **changes}})
        again = replace(context, params=params)
        annotate.run(again)
        report = read_json(context.reports / "annotate/toy.json")
        assert (report["q_model"]["kind"], report["q_model"]["held_out_tasks"]) == (kind, 1)
        assert report["q_model"]["steps"] > 0
        assert set(report["q_model"]["held_out"]) == {"pairs", "accuracy", "correlation"}
        assert report["progress"]["train"]["examples"] + 3 * report["progress"]["held_out_tasks"] == 12
        load_q_model(context.data / "models/q/toy", context.data / "models/sft")
        ProgressEstimator.load(context.data / "annotated/toy/progress_model")
        files = [path for folder in ("data/annotated", "data/models/q", "reports") for path in (context.root / folder).rglob("*")]
        written.append({str(path): path.read_bytes() for path in files if path.is_file()})
        shutil.rmtree(context.data / "models/q")
    assert written[0] == written[3]


def test_without_trees_only_what_learns_from_rollouts_is_fitted(context: StageContext):
    """Contract: annotate.tasks 0 grows no trees and fits no step-value model; tables are there and empty, costs are 0, and the
    progress estimator and the judge model, which need no trees, are fitted and measured as ever. Checkpoints of an interrupted
    run are removed. The report names the domain, so that no two domains have equal outputs, which DVC would take from each other.
    """
    from stages.values.progress import ProgressEstimator

    play_episodes(context)
    folder = context.data / "annotated/toy"
    annotate.run(context)  # what it leaves must not be taken for this run's
    left = Checkpoints(context)
    left.save("tree-0", [])
    judge = {"kind": "reward", "epochs": 1.0, "options": ["a", "b"], "valid_share": 0.5}
    for models in ({}, {"progress": {"kind": "spa", "epochs": 1.0}, "judge_model": judge}):
        values = {**VALUES, "annotate": {**VALUES["annotate"], "tasks": 0, **models}}
        annotate.run(replace(context, params=parse_params(values)))
        assert [read_rows(folder / f"{name}.parquet") for name in ("nodes", "labels", "pairs")] == [[], [], []]
        costs = read_json(folder / "costs.json")
        assert costs["environment_steps"] == 0
        assert set(costs.values()) == {0}
        assert not (folder / "value_model").exists()
        assert not left.parent.exists()
        assert read_json(context.data / "models/q/toy/q_model.json") == {"params": {"kind": "none"}}
    report = read_json(context.reports / "annotate/toy.json")
    assert (report["domain"], report["trees"], report["environment_steps"]) == ("toy", 0, 0)
    assert "value_model" not in report
    assert report["progress"]["train"]["tasks"] + report["progress"]["held_out_tasks"] == 8
    ProgressEstimator.load(folder / "progress_model")
    assert report["judge_model"]["against_gold"]["pairs"] > 0
    assert load_policy(folder / "judge_model").hash
    assert {row["status"] for row in read_rows(folder / "judgments.parquet")} == {"ok"}


def test_all_models_hold_out_the_same_tasks(context: StageContext, monkeypatch: pytest.MonkeyPatch):
    """Contract: the step-value model, the Q-model and the progress estimator share one split of the tasks, so that none is
    evaluated on tasks that a model it started from was trained on."""
    from stages.annotation import q_fitting
    from stages.values import progress, step_value

    seen: dict[str, set[str]] = {}

    def record_tasks(module: Any, name: str, argument: int, key: str) -> None:
        original = getattr(module, name)

        def recorded(*args: Any, **settings: Any) -> Any:
            seen[key] = {example.task_id for example in args[argument]}
            return original(*args, **settings)

        monkeypatch.setattr(module, name, recorded)

    record_tasks(step_value, "fit", 1, "values train")
    record_tasks(step_value, "predict", 1, "values")
    record_tasks(q_fitting, "fit_regression", 1, "q train")
    record_tasks(q_fitting, "evaluate", 1, "q")
    record_tasks(progress, "fit_progress", 1, "progress train")
    record_tasks(progress, "evaluate", 1, "progress")
    play_episodes(context)
    for seed in range(2):
        q_model = {"kind": "regression", "init": "value_model", "epochs": 1.0}
        more = {"iterations": 6, "value_model": {"trains": "all"}, "q_model": q_model, "progress": {"kind": "spa", "epochs": 1.0}}
        values = {**VALUES, "seed": seed, "annotate": {**VALUES["annotate"], **more}}
        annotate.run(replace(context, params=parse_params(values)))
        assert seen["values"] == seen["q"] <= seen["progress"]
        assert seen["values train"] == seen["progress train"], "rollouts of tasks without a tree are learnt from, too"
        for held_out in ("values", "q", "progress"):
            for train in ("values train", "q train", "progress train"):
                assert not seen[held_out] & seen[train]
        assert seen["progress"] | seen["progress train"] == {task.task_id for task in tasks(8)}


def play_episodes(context: StageContext) -> None:
    """Writes the rollout stage's output: the policy's episodes on the training tasks."""
    from stages.agent.chat import Chat
    from stages.agent.environment_pool import EnvironmentPool
    from stages.agent.policy import load_policy
    from stages.agent.rollout import Labels, attempts, collect
    from stages.engine.engine import Sampling
    from stages.engine.torch_engine import TorchEngine
    from stages.records.episode import write_episodes

    policy = load_policy(context.data / "models/sft")
    chat = Chat(policy.tokenizer)
    engine = TorchEngine(policy.model, [chat.end_of_turn], 8, 200)
    with EnvironmentPool(Toy) as pool:
        requests = attempts(tasks(8), 3)
        sampling = Sampling(max_tokens=2, top_k=3)
        episodes = collect(engine, chat, pool, requests, sampling, Labels(0), max_length=200, width=8)
    write_episodes(context.data / "rollouts/toy/episodes.parquet", episodes)


VALUE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("policy", {}),
    "hidden": ("policy", {"hidden": 8}),
    "whole": ("own", {"trains": "all"}),
}


@pytest.mark.parametrize("name", slow_except(list(VALUE_MODELS), "linear", "hidden"))
def test_stage_with_value_model_resumes_with_same_bytes(context: StageContext, monkeypatch: pytest.MonkeyPatch, name: str):
    """Contract: with a value model, fitted on rollout's episodes, the stage grows trees without rollouts; resumed after a kill it
    writes the same bytes, and the policy's weights do not change."""
    backbone, fitted = VALUE_MODELS[name]
    evaluation = {"kind": "value_model", "backbone": backbone}
    more = {"expansion": {"kind": "eager"}, "evaluation": evaluation, "labels": {"q": "tree", "min_visits": 1}, "backup": "max"}
    params = parse_params({**VALUES, "annotate": {**VALUES["annotate"], **more, "value_model": fitted}})
    context = replace(context, params=params)
    play_episodes(context)
    weights = hashlib.sha256((context.data / "models/sft/model.safetensors").read_bytes()).hexdigest()
    annotate.run(context)
    whole = outputs(context)
    nodes = read_rows(context.data / "annotated/toy/nodes.parquet")
    read = [row["model_value"] for row in nodes if row["model_value"] is not None and not row["terminal"]]
    assert len(set(read)) > 5
    assert all(0.0 <= value <= 1.0 for value in read)
    assert read_json(context.reports / "annotate/toy.json")["values_read"] == len(read)
    for folder in ("data/annotated", "reports"):
        shutil.rmtree(context.root / folder)
    grow, grown = Search.grow, []

    def dies_in_the_second_chunk(self: Search, part: Any, on_tree: Any = None) -> Any:
        if grown:
            raise KeyboardInterrupt
        grown.append(len(part))
        return grow(self, part, on_tree)

    monkeypatch.setattr(Search, "grow", dies_in_the_second_chunk)
    with pytest.raises(KeyboardInterrupt):
        annotate.run(context)
    monkeypatch.setattr(Search, "grow", grow)
    annotate.run(context)
    assert outputs(context) == whole
    assert hashlib.sha256((context.data / "models/sft/model.safetensors").read_bytes()).hexdigest() == weights


def test_rollouts_are_played_in_a_learnt_model(context: StageContext, monkeypatch: pytest.MonkeyPatch):
    """Contract: model_rollouts fits a model to the rollouts before the search; the report has its errors, and a stage that was
    killed in between ends with the same bytes."""
    from random import Random

    from stages.environments.keydoor import KeydoorDomain, KeydoorSettings
    from stages.environments.keydoor.settings import WeightedLevel
    from stages.records.episode import Episode, Owner, TurnRecord, write_episodes

    domain = KeydoorDomain(KeydoorSettings(levels=(WeightedLevel(corridor=1, doors=0, side_rooms=2),), max_turns=4))
    monkeypatch.setattr(annotate, "open_domain", lambda name, settings: domain)
    made = [replace(domain.task(record, {}), domain="toy", split="train") for record in domain.recipes(8, 0)]
    write_tasks(context.data / "curated/toy/tasks.parquet", made)
    write_json(context.data / "rollouts/toy/difficulty.json", {})
    environment, episodes = domain.make(Path()), []
    for task in made:
        environment.reset(task)
        episode = Episode(task.task_id, task.task_id, "toy", "g", 0, "", "", 1.0, 1.0, 0)
        episode.append([1, 5], Owner.PROMPT, -1)
        while not environment.snapshot().over:
            action = Random(task.task_id).choice(environment.admissible())
            step, start = environment.step(action), len(episode.token_ids)
            episode.append([7], Owner.POLICY, len(episode.turns), [-1.0])
            episode.turns.append(TurnRecord(action, "", True, step.reward, 0.0, "", action, start, start + 1))
        episodes.append(episode)
    write_episodes(context.data / "rollouts/toy/episodes.parquet", episodes)
    search = {
        "expansion": {"kind": "eager"},
        "evaluation": {"keep_rollouts": False, "model_rollouts": {"updates": 20, "width": 8}},
    }
    context = replace(context, params=parse_params({**VALUES, "annotate": {**VALUES["annotate"], "iterations": 4, **search}}))
    annotate.run(context)
    whole = outputs(context)
    report = read_json(context.reports / "annotate/toy.json")["model_rollouts"]
    assert report["steps"] + report["held_out"]["steps"] == sum(len(episode.turns) for episode in episodes)
    assert 0 <= report["held_out"]["exact"] <= 1
    costs = read_json(context.data / "annotated/toy/costs.json")
    assert costs["model_steps"] > 0 < costs["environment_steps"]
    grow = Search.grow

    def killed(self: Search, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for folder in ("annotated", "models/q"):
        shutil.rmtree(context.data / folder)
    monkeypatch.setattr(Search, "grow", killed)
    with pytest.raises(KeyboardInterrupt):
        annotate.run(context)
    monkeypatch.setattr(Search, "grow", grow)
    annotate.run(context)
    assert outputs(context) == whole
