"""annotate: tree search from the SFT policy over one domain's training tasks; step labels, preference pairs, a step-value model,
and, where they are asked for, a Q-model and (from the rollouts) a progress estimator.

data/curated/<domain>, data/rollouts/<domain>/difficulty.json and data/models/sft -> data/annotated/<domain>/{nodes.parquet,
labels.parquet, pairs.parquet, value_model/, progress_model/}, data/models/q/<domain> and reports/annotate/<domain>.json.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages import params
from stages.annotation.labels import LABEL_SCHEMA, label_rows
from stages.annotation.nodes import node_schema
from stages.annotation.pairs import PAIR_SCHEMA, pair_rows
from stages.annotation.settings import Annotate
from stages.annotation.summary import Forest, choose_tasks, summary
from stages.annotation.units import uses_value_model, value_head, value_range
from stages.engine.attention import use_attention
from stages.environments.protocol import Domain
from stages.environments.registry import open_domain
from stages.records.episode import read_json, read_rows, read_tasks, write_json, write_table
from stages.records.task import Task
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.stage import StageContext, stage_run
from stages.seeding import key64
from stages.tracking import open_tracker

if TYPE_CHECKING:
    from stages.agent.player import Player
    from stages.agent.policy import Policy
    from stages.annotation.search import Reader, Search
    from stages.annotation.tree import Tree
    from stages.runtime.shards import Shard
    from stages.values.fitting import TaskSplit
    from stages.values.step_value import StepValueModel


def grow_forest(
    search: Search, tasks: Sequence[Task], chunk: int, checkpoints: Checkpoints, bar: Any, shard: Shard | None = None
) -> Forest:
    """Grow one tree per task, `chunk` at a time; each finished tree is a checkpoint, and those there are grown no more: what
    grows beside a tree changes nothing about it. A shard grows its own chunks alone."""
    forest = Forest([], [])
    for number, start in enumerate(range(0, len(tasks), chunk)):
        if shard and not shard.owns(number):
            continue
        part = tasks[start : start + chunk]
        kept: dict[str, Forest | None] = {task.task_id: checkpoints.load(_checkpoint(task.task_id)) for task in part}
        missing = [task for task in part if kept[task.task_id] is None]
        if len(missing) < len(part):
            bar.restore(len(part) - len(missing))

        def finished(tree: Tree, kept: dict[str, Forest | None] = kept) -> None:
            kept[tree.task_id] = Forest.of([tree])
            checkpoints.save(_checkpoint(tree.task_id), kept[tree.task_id])
            bar.advance(1, f"{len(tree.nodes)} nodes")

        if missing:
            search.grow(missing, on_tree=finished)
        forest = sum((one for one in kept.values() if one is not None), start=forest)
    return forest


def _checkpoint(task_id: str) -> str:
    """The name of a tree's checkpoint: task ids may hold what file names may not."""
    return f"tree-{key64('tree', task_id):016x}"


def open_reader(context: StageContext, player: Player, params: Annotate, checkpoints: Checkpoints) -> Reader | None:
    """The value model that leaves are read with, fitted on the episodes of rollout; None where rollouts alone value them.

    Raises ValueError for a back end without hidden states."""
    if not uses_value_model(params.evaluation):
        return None
    from stages.agent.policy import load_policy
    from stages.annotation.leaf_values import HeadEvaluator, episode_paths, fit_leaf_model, fitted_weights, leaf_model
    from stages.engine.torch_engine import TorchEngine

    resources = context.params.resources
    own = params.evaluation.backbone == "own"
    if not own and not isinstance(player.engine, TorchEngine):
        raise ValueError(
            f"annotate.evaluation.backbone 'policy' reads the states of the torch engine; resources.engine.kind is "
            f"'{resources.engine.kind}', which gives none: set backbone to own"
        )
    policy = player.policy or load_policy(context.data / "models" / "sft", device=resources.device, precision=resources.precision)
    weights = checkpoints.load("leaf-values")
    model = leaf_model(policy.model, params, weights)
    if weights is None:
        paths = episode_paths(read_rows(context.data / "rollouts" / str(context.domain) / "episodes.parquet"), params)
        with context.progress("fitting leaf values", 1, "model"):
            fit_leaf_model(model, paths, params, context.params.seed, resources.tokens_per_batch)
        checkpoints.save("leaf-values", fitted_weights(model, params))
    model.eval()
    engine = TorchEngine(model.backbone, [], resources.slots, context.params.model.max_length) if own else player.engine
    return HeadEvaluator(engine, model)


def search_trees(context: StageContext, domain: Domain, player: Player, tasks: Sequence[Task], params: Annotate) -> Forest:
    """The trees of all tasks, grown by the policy."""
    from stages.agent.rollout import EnvironmentPool
    from stages.annotation.search import Search

    assert context.domain is not None
    worlds = context.data / "curated" / context.domain / "worlds"
    max_length, checkpoints = context.params.model.max_length, Checkpoints(context, classes=(Forest,))
    reader = open_reader(context, player, params, checkpoints)
    with EnvironmentPool(lambda: domain.make(worlds)) as pool, context.progress("growing", len(tasks), "tree") as bar:
        search = Search(player.engine, player.chat, pool, params, context.params.seed, max_length, reader=reader)
        return grow_forest(search, tasks, params.chunk, checkpoints, bar, context.shard)


def fit_value_model(
    context: StageContext, policy: Policy, rows: Sequence[Mapping[str, Any]], params: Annotate
) -> tuple[StepValueModel, TaskSplit, dict[str, Any]]:
    """The step-value model, fitted on most tasks' trees, which tasks those are, and its calibration on those of the others."""
    from stages.annotation.calibration import calibration
    from stages.annotation.paths import mean_value, value_paths
    from stages.values.fitting import TaskSplit
    from stages.values.step_value import StepValueModel, fit, predict

    seed, micro = context.params.seed, context.params.resources.tokens_per_batch
    paths = value_paths(rows, params)
    split = TaskSplit.of((path.task_id for path in paths), params.value_model.valid_share, seed)
    train, held_out = split.parts(paths)
    backbone = copy.deepcopy(policy.model.base_model).float()
    use_attention(backbone, "sdpa")  # a third faster than the engine's; it is what the saved model loads with
    model = StepValueModel(backbone, value_head(params))
    model.to(context.params.resources.device)
    baseline = mean_value(train)
    total = round(params.value_model.epochs * sum(len(path.token_ids) for path in train))
    with context.progress("fitting values", total, "token") as bar:

        def on_step(step: int, tokens: int, loss: float) -> None:
            bar.advance(tokens, f"loss {loss:.4f}")
            context.metric("value_model/loss", loss, step)

        fitted = fit(model, train, params.value_model, seed, micro, on_step)
    metrics = {
        "train": {"tasks": len({path.task_id for path in train}), "paths": len(train), "mean_value": baseline},
        "steps": fitted.steps,
        "tokens": fitted.tokens,
        "loss_first": fitted.history[0],
        "loss_last": fitted.history[-1],
        "clamped": fitted.clamped,
        "held_out_tasks": len({path.task_id for path in held_out}),
        "calibration": calibration(*predict(model, held_out, micro), baseline, value_range(params)),
    }
    return model, split, metrics


def fit_others(
    context: StageContext,
    policy: Policy,
    values: StepValueModel,
    rows: Sequence[Mapping[str, Any]],
    pairs: Sequence[Mapping[str, Any]],
    params: Annotate,
    split: TaskSplit,
) -> dict[str, Any]:
    """The Q-model and the progress estimator, where they are asked for; what the report says of them."""
    from stages.annotation.fit_models import fit_progress, fit_q_model
    from stages.values.q_model import save_none

    assert context.domain is not None
    told: dict[str, Any] = {}
    q_folder = context.data / "models" / "q" / context.domain
    if params.q_model.kind == "none":
        save_none(q_folder)
    else:
        q_model, told["q_model"] = fit_q_model(context, policy, values, rows, pairs, params, split)
        q_model.save(q_folder, policy.hash)
    if params.progress.kind != "none":
        progress, told["progress"] = fit_progress(context, policy, params, split)
        progress.save(context.data / "annotated" / context.domain / "progress_model")
    return told


def log(context: StageContext, report: Mapping[str, Any]) -> None:
    for name in ("trees", "nodes", "iterations", "environment_steps", "policy_tokens", "root_success", "root_tree_value"):
        context.metric(name, float(report[name]))
    context.metric("labels", float(report["labels"]["count"]))
    context.metric("pairs", float(report["pairs"]["count"]))
    context.metric("pair_task_share", report["pairs"]["task_share"])
    for name in ("brier", "mse", "baseline_mse", "explained_variance", "correlation", "ece"):
        context.metric(f"value_model/{name}", report["value_model"]["calibration"][name])
    for name in ("q_model", "progress"):
        for key, value in report.get(name, {}).get("held_out", {}).items():
            context.metric(f"{name}/{key}", float(value))
    context.artifact(context.reports / "annotate" / f"{context.domain}.json")


def run(context: StageContext) -> None:
    from stages.agent.player import EngineSettings, open_player
    from stages.agent.policy import load_policy

    assert context.domain is not None
    params: Annotate = context.section("annotate")
    out = context.data / "annotated" / context.domain

    # Which tasks: those the policy sometimes solves tell most about single steps.
    tasks = read_tasks(context.data / "curated" / context.domain / "tasks.parquet", "train")
    difficulty = read_json(context.data / "rollouts" / context.domain / "difficulty.json")
    chosen = choose_tasks(tasks, difficulty, params.tasks, context.params.seed)

    # Search, and store the nodes as they are.
    resources = context.params.resources
    start = context.data / "models" / "sft"
    domain = open_domain(context.domain, context.params.per_domain[context.domain].environment)
    settings = EngineSettings.of(resources, context.params.model.max_length, context.params.model.thinking)
    player = open_player(start, settings)
    forest = search_trees(context, domain, player, chosen, params)
    player.close()
    if context.shard:
        return
    policy = player.policy or load_policy(start, device=resources.device, precision=resources.precision)
    write_table(out / "nodes.parquet", node_schema(params), forest.rows)

    # Labels and pairs follow from the nodes alone.
    labels, pairs = label_rows(forest.rows, params), pair_rows(forest.rows, params)
    write_table(out / "labels.parquet", LABEL_SCHEMA, labels)
    write_table(out / "pairs.parquet", PAIR_SCHEMA, pairs)

    # What a history is worth to the policy, as a model that RL can ask anywhere.
    model, split, fitted = fit_value_model(context, policy, forest.rows, params)
    model.save(out / "value_model")
    report = {**summary(forest, labels, pairs, difficulty), "value_model": fitted}
    report |= fit_others(context, policy, model, forest.rows, pairs, params, split)
    write_json(context.reports / "annotate" / f"{context.domain}.json", report)
    log(context, report)
    Checkpoints(context).clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("annotate", run, params, open_tracker, per_domain=True, sharded=True))
