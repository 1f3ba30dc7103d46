"""annotate: tree search with the SFT policy over a domain's training tasks, for step labels, preference pairs and a step-value
model; on request also a Q-model and, from the rollouts, a progress estimator.

data/curated/<domain>, data/rollouts/<domain>/difficulty.json and data/models/sft -> data/annotated/<domain>/{nodes.parquet,
costs.json, labels.parquet, pairs.parquet, value_model/, progress_model/}, data/models/q/<domain> and
reports/annotate/<domain>.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages import params
from stages.annotation.forest import choose_tasks, search_trees
from stages.annotation.labels import LABEL_SCHEMA, label_rows
from stages.annotation.nodes import node_schema
from stages.annotation.pairs import PAIR_SCHEMA, pair_rows
from stages.annotation.settings import Annotate
from stages.annotation.summary import summary
from stages.environments.registry import open_domain
from stages.records.episode import read_json, read_tasks, write_json, write_table
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker


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
    from stages.agent.player import open_player
    from stages.agent.policy import load_policy
    from stages.annotation.fit_models import fit_progress, fit_q_model, fit_value_model
    from stages.engine.engine import EngineSettings
    from stages.values.q_model import save_none

    assert context.domain is not None
    params: Annotate = context.section("annotate")
    out = context.data / "annotated" / context.domain

    # Choose tasks: those that the policy sometimes solves come first.
    tasks = read_tasks(context.data / "curated" / context.domain / "tasks.parquet", "train")
    difficulty = read_json(context.data / "rollouts" / context.domain / "difficulty.json")
    chosen = choose_tasks(tasks, difficulty, params.tasks, context.params.seed)

    # Search, and write the nodes and what they cost.
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
    write_table(out / "nodes.parquet", node_schema(params, forest.rows), forest.rows)
    write_json(out / "costs.json", forest.total_costs)

    # Derive labels and pairs from the nodes.
    labels, pairs = label_rows(forest.rows, params), pair_rows(forest.rows, params)
    write_table(out / "labels.parquet", LABEL_SCHEMA, labels)
    write_table(out / "pairs.parquet", PAIR_SCHEMA, pairs)

    # Fit the step-value model and, on request, the other models.
    values, split, fitted = fit_value_model(context, policy, forest.rows, params, context.params.seed)
    values.save(out / "value_model")
    report = {**summary(forest, labels, pairs, difficulty), "value_model": fitted}
    q_folder = context.data / "models" / "q" / context.domain
    if params.q_model.kind == "none":
        save_none(q_folder)
    else:
        q_model, report["q_model"] = fit_q_model(context, policy, values, forest.rows, pairs, params, split)
        q_model.save(q_folder, policy.hash)
    if params.progress.kind != "none":
        progress, report["progress"] = fit_progress(context, policy, params, split)
        progress.save(out / "progress_model")
    write_json(context.reports / "annotate" / f"{context.domain}.json", report)
    log(context, report)
    Checkpoints(context).clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("annotate", run, params, open_tracker, per_domain=True, sharded=True, forked=True))
