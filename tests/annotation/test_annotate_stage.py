"""The annotate stage on a tiny random policy and a toy environment: its files, resume, shards, and the torch engine."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import annotate
from stages.annotation.forest import choose_tasks
from stages.annotation.labels import label_rows
from stages.annotation.nodes import node_schema
from stages.annotation.pairs import pair_rows
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.environments.protocol import Observation, Step
from stages.params import parse_params
from stages.records.episode import NODE_SCHEMA, read_json, read_rows, write_json, write_table, write_tasks
from stages.records.task import Task
from stages.runtime.shards import Shard
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker


class Toy:
    """Three turns; a hash of the actions decides on success."""

    def reset(self, task: Task) -> Observation:
        self.task, self.actions = task, ()
        return Observation(f"you are in the {task.task_id} room")

    def step(self, action: str) -> Step:
        self.actions = (*self.actions, action)
        end = len(self.actions) == 3
        won = end and hashlib.sha256(repr((self.task.task_id, self.actions)).encode()).digest()[0] < 128
        return Step(Observation(f"there is nothing here {len(self.actions)}"), float(won), True, end, False)

    def snapshot(self) -> Any:
        return self.task, self.actions

    def restore(self, state: Any) -> None:
        self.task, self.actions = state

    def state_key(self) -> str:
        return repr(self.actions)

    def close(self) -> None: ...


class ToyDomain:
    def make(self, folder: Path) -> Toy:
        return Toy()


VALUES = {
    "domains": ["toy"],
    "per_domain": {"toy": {}},
    "resources": {"threads": 1, "slots": 8},
    "model": {"max_length": 200},
    "annotate": {
        "tasks": 6,
        "iterations": 12,
        "chunk": 2,
        "expand_k": 3,
        "sampling": {"max_tokens": 2, "top_k": 3},
        "pairs": {"min_visits": 1},
        "value_model": {"batch_tokens": 512},
    },
}


def tasks(count: int) -> list[Task]:
    return [Task(f"t{number:02d}", "toy", "train", number, "look", {}, 1.0) for number in range(count)]


@pytest.fixture
def context(tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    """A project with 8 training tasks, measured difficulties and the tiny policy as its SFT model."""
    monkeypatch.setattr(annotate, "open_domain", lambda name, settings: ToyDomain())
    (tmp_path / "params.yaml").write_text("{}\n")
    params = parse_params(VALUES)
    write_tasks(tmp_path / "data/curated/toy/tasks.parquet", tasks(8))
    write_json(tmp_path / "data/rollouts/toy/difficulty.json", {f"t{number:02d}": (number % 3) / 2 for number in range(7)})
    shutil.copytree(tiny_policy, tmp_path / "data/models/sft")
    return StageContext("annotate", "toy", params, tmp_path, Tracker())


def outputs(context: StageContext) -> dict[str, bytes]:
    files = [path for folder in ("data/annotated", "reports") for path in (context.root / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(context.root)): path.read_bytes() for path in sorted(files)}


def test_stage_writes_trees_labels_pairs_and_value_model(context: StageContext):
    """Contract: labels and pairs follow from the nodes, the report counts what the files hold, and no checkpoint is left."""
    annotate.run(context)
    params = context.section("annotate")
    folder = context.data / "annotated" / "toy"
    nodes = read_rows(folder / "nodes.parquet")
    assert read_rows(folder / "labels.parquet") == label_rows(nodes, params)
    assert read_rows(folder / "pairs.parquet") == pair_rows(nodes, params)
    report = read_json(context.reports / "annotate" / "toy.json")
    assert (report["trees"], report["iterations"], report["nodes"]) == (6, 6 * 12, len(nodes))
    assert report["policy_tokens"] > 0
    assert report["labels"]["count"] == len(read_rows(folder / "labels.parquet"))
    assert sum(item["count"] for item in report["value_model"]["calibration"]["bins"]) > 0
    assert report["value_model"]["held_out_tasks"] == 1
    assert (folder / "value_model" / "head.safetensors").exists()
    assert not (context.root / ".bellwether" / "checkpoints").exists() or not any(
        (context.root / ".bellwether" / "checkpoints").rglob("*.pt")
    )


def test_stage_fits_q_model_and_progress_estimator_if_configured(context: StageContext):
    """Contract: a Q-model and a progress estimator are fitted reproducibly, byte for byte, and evaluated on held-out tasks; by
    default q_model.json says that there is none."""
    from stages.records.episode import Episode, Owner, TurnRecord, write_episodes
    from stages.values.progress import ProgressEstimator
    from stages.values.q_model import load_q_model

    annotate.run(context)
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
        params = parse_params({**VALUES, "annotate": {**VALUES["annotate"], **changes}})
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
    for seed in range(4):
        q_model = {"kind": "regression", "init": "value_model", "epochs": 1.0}
        more = {"iterations": 6, "q_model": q_model, "progress": {"kind": "spa", "epochs": 1.0}}
        values = {**VALUES, "seed": seed, "annotate": {**VALUES["annotate"], **more}}
        annotate.run(replace(context, params=parse_params(values)))
        assert seen["values"] == seen["q"] <= seen["progress"]
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


@pytest.mark.parametrize("backbone", ["policy", "own"])
def test_stage_with_value_model_resumes_with_same_bytes(context: StageContext, monkeypatch: pytest.MonkeyPatch, backbone: str):
    """Contract: with a value model, fitted on rollout's episodes, the stage grows trees without rollouts; resumed after a kill it
    writes the same bytes, and the policy's weights do not change."""
    evaluation = {"kind": "value_model", "backbone": backbone}
    more = {"expansion": {"kind": "eager"}, "evaluation": evaluation, "labels": {"q": "tree", "min_visits": 1}, "backup": "max"}
    params = parse_params({**VALUES, "annotate": {**VALUES["annotate"], **more}})
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


def test_resumed_or_sharded_stage_writes_same_bytes(context: StageContext, monkeypatch: pytest.MonkeyPatch):
    """Contract: killed between or within chunks and run again, or after shards have grown the trees, the stage grows only missing
    trees and writes the same bytes."""
    annotate.run(context)
    whole = outputs(context)
    for folder in ("data/annotated", "reports"):
        shutil.rmtree(context.root / folder)
    grow, grown = Search.grow, []

    def dies_in_the_third_chunk(self: Search, part: Any, on_tree: Any = None) -> Any:
        if len(grown) == 2:
            raise KeyboardInterrupt
        grown.append(len(part))
        return grow(self, part, on_tree)

    monkeypatch.setattr(Search, "grow", dies_in_the_third_chunk)
    with pytest.raises(KeyboardInterrupt):
        annotate.run(context)
    assert outputs(context) == {}
    resumed = []
    monkeypatch.setattr(Search, "grow", lambda self, part, on_tree=None: resumed.append(len(part)) or grow(self, part, on_tree))
    annotate.run(context)
    assert (grown, resumed) == ([2, 2], [2])
    assert outputs(context) == whole

    # Killed within a chunk of six trees: the finished ones are not grown again.
    for folder in ("data/annotated", "reports"):
        shutil.rmtree(context.root / folder)
    values = {**VALUES, "annotate": {**VALUES["annotate"], "chunk": 6}}
    together = replace(context, params=parse_params(values))

    def dies_after_two_trees(self: Search, part: Any, on_tree: Any = None) -> Any:
        finished = []

        def stop_at_third(tree: Any) -> None:
            if len(finished) == 2:
                raise KeyboardInterrupt
            finished.append(tree)
            on_tree(tree)

        return grow(self, part, stop_at_third)

    monkeypatch.setattr(Search, "grow", dies_after_two_trees)
    with pytest.raises(KeyboardInterrupt):
        annotate.run(together)
    resumed.clear()
    monkeypatch.setattr(Search, "grow", lambda self, part, on_tree=None: resumed.append(len(part)) or grow(self, part, on_tree))
    annotate.run(together)
    assert resumed == [4]
    assert outputs(context) == whole

    # Two shards: each grows three of the six trees, two at a time; then nothing is left to grow.
    for folder in ("data/annotated", "reports"):
        shutil.rmtree(context.root / folder)
    by_shard = []
    for index in (2, 1):
        resumed.clear()
        annotate.run(replace(context, shard=Shard(index, 2)))
        by_shard.append(len(resumed))
        assert outputs(context) == {}
    resumed.clear()
    annotate.run(context)
    assert (by_shard, resumed) == ([2, 2], [])
    assert outputs(context) == whole


def test_torch_engine_trees_do_not_depend_on_other_trees(tiny_policy: Path, tmp_path: Path):
    """Contract: a tree grown alone and one grown among 16 in few slots have the same bytes."""
    from stages.agent.chat import Chat
    from stages.agent.environment_pool import EnvironmentPool
    from stages.agent.policy import load_policy
    from stages.engine.torch_engine import TorchEngine

    policy = load_policy(tiny_policy)
    chat = Chat(policy.tokenizer)
    params = Annotate(iterations=12, expand_k=3, sampling={"max_tokens": 3, "top_k": 4}, evaluation={"rollouts": 2})

    def grow(part: list[Task], slots: int) -> list[Any]:
        engine = TorchEngine(policy.model, [chat.end_of_turn], slots, 300)
        with EnvironmentPool(Toy) as pool:
            return Search(engine, chat, pool, params, 0, 300).grow(part)

    everything = tasks(16)
    together = grow(everything, slots=8)
    for index in (0, 7):
        alone = grow(everything[index : index + 1], slots=4)
        for name, trees in (("alone", alone), ("together", together[index : index + 1])):
            write_table(tmp_path / name, NODE_SCHEMA, trees[0].rows())
        assert (tmp_path / "alone").read_bytes() == (tmp_path / "together").read_bytes()
    for tree in together:
        for node in tree.nodes[1:]:
            assert node.edge.action == chat.action_text(node.edge.token_ids)
            assert len(node.edge.logprobs) == len(node.edge.token_ids)


@pytest.mark.parametrize("backbone", ["policy", "own"])
def test_torch_engine_values_do_not_depend_on_other_trees(tiny_policy: Path, tmp_path: Path, backbone: str):
    """Contract: also when values are read and actions drawn in the same passes, a tree alone and one among 16 have the same
    bytes."""
    from stages.agent.chat import Chat
    from stages.agent.environment_pool import EnvironmentPool
    from stages.agent.policy import load_policy
    from stages.annotation.leaf_values import HeadEvaluator, leaf_model
    from stages.engine.torch_engine import TorchEngine

    policy = load_policy(tiny_policy)
    chat = Chat(policy.tokenizer)
    params = Annotate(
        iterations=10,
        expand_k=3,
        leaves_per_tree=2,
        expansion={"kind": "eager"},
        evaluation={"kind": "value_model", "backbone": backbone},
        labels={"q": "tree"},
        sampling={"max_tokens": 3, "top_k": 4},
    )
    model = leaf_model(policy.model, params)
    with torch.no_grad():  # an untrained head is constant
        torch.manual_seed(0)
        model.output.weight.normal_(0.0, 1.0)

    def grow(part: list[Task], slots: int) -> list[Any]:
        engine = TorchEngine(policy.model, [chat.end_of_turn], slots, 300)
        own = TorchEngine(model.backbone, [], slots, 300) if backbone == "own" else engine
        with EnvironmentPool(Toy) as pool:
            return Search(engine, chat, pool, params, 0, 300, reader=HeadEvaluator(own, model)).grow(part)

    everything = tasks(16)
    together = grow(everything, slots=8)
    for index in (0, 7):
        alone = grow(everything[index : index + 1], slots=4)
        for name, trees in (("alone", alone), ("together", together[index : index + 1])):
            write_table(tmp_path / name, node_schema(params), trees[0].rows())
        assert (tmp_path / "alone").read_bytes() == (tmp_path / "together").read_bytes()
    assert len({node.model_value for tree in together for node in tree.nodes if node.model_value is not None}) > 20


def test_node_logprobs_equal_training_logprobs(tiny_policy: Path):
    """Contract: a stored action's log-probabilities equal those of a forward pass over the node's whole history, to 1e-5."""
    import torch

    from stages.agent.chat import Chat
    from stages.agent.environment_pool import EnvironmentPool
    from stages.agent.logprobs import token_logprobs
    from stages.agent.policy import load_policy
    from stages.engine.torch_engine import TorchEngine

    policy = load_policy(tiny_policy)
    chat = Chat(policy.tokenizer)
    engine = TorchEngine(policy.model, [chat.end_of_turn], 8, 300)
    params = Annotate(iterations=10, expand_k=2, sampling={"max_tokens": 3})
    with EnvironmentPool(Toy) as pool:
        (tree,) = Search(engine, chat, pool, params, 0, 300).grow(tasks(1))
    for node in tree.nodes[1:]:
        history = [
            token
            for index in tree.path(node.index)[:-1]
            for token in tree.nodes[index].edge.token_ids + tree.nodes[index].edge.context_ids
        ]
        ids = torch.tensor([history + list(node.edge.token_ids)])
        mask = torch.arange(ids.shape[1])[None] >= len(history)
        with torch.no_grad():
            logs = token_logprobs(policy.model, ids, mask)
        assert logs[0, len(history) :].tolist() == pytest.approx(list(node.edge.logprobs), abs=1e-5)


def test_tasks_of_medium_difficulty_are_chosen_first():
    """Contract: tasks that the policy sometimes solves come before untried ones, these before tasks that it never or always
    solves."""
    difficulty = {"t00": 0.0, "t01": 1.0, "t02": 0.5, "t03": 0.25, "t05": 0.75, "t06": 0.0}
    for seed in range(5):
        assert [task.task_id for task in choose_tasks(tasks(8), difficulty, 3, seed)] == ["t02", "t03", "t05"]
        assert [task.task_id for task in choose_tasks(tasks(8), difficulty, 5, seed)] == ["t02", "t03", "t04", "t05", "t07"]
    assert len({tuple(task.task_id for task in choose_tasks(tasks(8), difficulty, 6, seed)) for seed in range(8)}) > 1
    assert len(choose_tasks(tasks(8), difficulty, 99, 0)) == 8


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
