"""annotate: tree search with the SFT policy over a domain's training tasks, for step labels, preference pairs and a step-value
model; on request also a Q-model and, from the rollouts, a progress estimator and a judge model.

data/curated/<domain>, data/rollouts/<domain>/difficulty.json and data/models/sft -> data/annotated/<domain>/{nodes.parquet,
costs.json, labels.parquet, pairs.parquet, value_model/, progress_model/, judge_model/, preferences.parquet,
judgments.parquet}, data/models/q/<domain> and reports/annotate/<domain>.json.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stages import params
from stages.annotation.forest import choose_tasks, grown, search_trees
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

if TYPE_CHECKING:
    from stages.agent.policy import Policy
    from stages.environments.protocol import Domain
    from stages.records.task import Task


def log(context: StageContext, report: Mapping[str, Any]) -> None:
    for name in ("trees", "nodes", "iterations", "environment_steps", "policy_tokens", "root_success", "root_tree_value"):
        context.metric(name, float(report[name]))
    context.metric("labels", float(report["labels"]["count"]))
    context.metric("pairs", float(report["pairs"]["count"]))
    context.metric("pair_task_share", report["pairs"]["task_share"])
    for name in ("brier", "mse", "baseline_mse", "explained_variance", "correlation", "ece"):
        context.metric(f"value_model/{name}", report["value_model"]["calibration"][name])
    log_models(context, report)


def log_models(context: StageContext, report: Mapping[str, Any]) -> None:
    for name in ("q_model", "progress", "judge_model", "model_rollouts"):
        for key, value in report.get(name, {}).get("held_out", {}).items():
            context.metric(f"{name}/{key}", float(value))
    context.artifact(context.reports / "annotate" / f"{context.domain}.json")


def fit_models(
    context: StageContext, policy: Policy, rows: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], params: Annotate
) -> dict[str, Any]:
    """Fit the step-value model and, on request, Q-model and progress estimator, and write them; their reports by name. rows,
    pairs: the trees' nodes and preference pairs."""
    from stages.annotation.fit_models import fit_progress, fit_q_model, fit_value_model, rollout_paths
    from stages.annotation.shared_reading import SharedReading
    from stages.values.q_model import save_none

    out, report = context.data / "annotated" / str(context.domain), {}
    episodes = rollout_paths(context, params)
    values, split, report["value_model"] = fit_value_model(
        context, policy, rows, episodes, params, context.params.seed, SharedReading(context)
    )
    values.save(out / "value_model")
    q_folder = context.data / "models" / "q" / str(context.domain)
    if params.q_model.kind == "none":
        save_none(q_folder)
    else:
        q_model, report["q_model"] = fit_q_model(context, policy, values, rows, pairs, params, split)
        q_model.save(q_folder, policy.hash)
    if params.progress.kind != "none":
        progress, report["progress"] = fit_progress(context, policy, params, split)
        progress.save(out / "progress_model")
    return report


def grow_nothing(context: StageContext, domain: Domain, tasks: Sequence[Task], params: Annotate) -> None:
    """annotate.tasks 0: write empty tables, and fit only what learns from rollouts alone."""
    from stages.annotation.tree import no_costs
    from stages.values.q_model import save_none

    out, costs = context.data / "annotated" / str(context.domain), {"iterations": 0, **no_costs(params)}
    # The domain keeps DVC from taking another domain's equal outputs for those of this stage, which it then would not run.
    report: dict[str, Any] = {"domain": context.domain, "trees": 0, **costs}
    for name, schema in (("nodes", node_schema(params)), ("labels", LABEL_SCHEMA), ("pairs", PAIR_SCHEMA)):
        write_table(out / f"{name}.parquet", schema, [])
    write_json(out / "costs.json", costs)
    shutil.rmtree(out / "value_model", ignore_errors=True)  # of an earlier run of this command
    save_none(context.data / "models" / "q" / str(context.domain))
    if params.progress.kind != "none" or params.judge_model.kind != "none":
        from stages.agent.policy import load_policy
        from stages.annotation.fit_models import fit_progress
        from stages.annotation.judge_model import fit_judge_model
        from stages.values.fitting import TaskSplit

        resources = context.params.resources
        policy = load_policy(context.data / "models" / "sft", device=resources.device, precision=resources.precision)
        if params.progress.kind != "none":
            split = TaskSplit(frozenset(), frozenset(), params.value_model.valid_share, context.params.seed)
            progress, report["progress"] = fit_progress(context, policy, params, split)
            progress.save(out / "progress_model")
        if params.judge_model.kind != "none":
            report["judge_model"] = fit_judge_model(context, policy, domain, tasks, [], [], params.judge_model, out)
    write_json(context.reports / "annotate" / f"{context.domain}.json", report)
    log_models(context, report)


def has_trees(context: StageContext) -> bool:
    """Whether there are trees to grow, which processes can share."""
    params: Annotate = context.section("annotate")
    return params.tasks > 0


def run(context: StageContext) -> None:
    assert context.domain is not None
    params: Annotate = context.section("annotate")
    out = context.data / "annotated" / context.domain

    tasks = read_tasks(context.data / "curated" / context.domain / "tasks.parquet", "train")
    domain = open_domain(context.domain, context.params.per_domain[context.domain].environment)
    if not params.tasks:
        if not context.shard:
            grow_nothing(context, domain, tasks, params)
            Checkpoints(context).clear()
        return

    from stages.agent.constrained_engine import constrained
    from stages.agent.player import open_player
    from stages.agent.policy import load_policy
    from stages.annotation.judge_model import fit_judge_model
    from stages.annotation.model_rollouts import learn_dynamics
    from stages.annotation.shared_reading import read_share
    from stages.engine.engine import EngineSettings

    # Choose tasks: those that the policy sometimes solves come first.
    difficulty = read_json(context.data / "rollouts" / context.domain / "difficulty.json")
    chosen = choose_tasks(tasks, difficulty, params.tasks, context.params.seed)

    # Search, and write the nodes and what they cost.
    resources = context.params.resources
    start = context.data / "models" / "sft"
    settings = EngineSettings.of(resources, context.params.model.max_length, context.params.model.thinking)
    player = open_player(start, settings)
    dynamics = learn_dynamics(context, domain, tasks, params, Checkpoints(context))
    engine = constrained(player.engine, player.chat, domain, "annotate", context.params.model.max_length)
    forest = search_trees(context, domain, replace(player, engine=engine), chosen, params, dynamics)
    player.close()
    if context.shard and not context.team:
        return
    policy = player.policy or load_policy(start, device=resources.device, precision=resources.precision)
    if context.team:  # a fork: once all trees are grown, it reads its share of what the value model is fitted to
        context.team.wait()
        read_share(context, policy, grown(context, chosen).rows, params)
        return
    write_table(out / "nodes.parquet", node_schema(params, forest.rows), forest.rows)
    write_json(out / "costs.json", forest.total_costs)

    # Derive labels and pairs from the nodes.
    labels, pairs = label_rows(forest.rows, params), pair_rows(forest.rows, params)
    write_table(out / "labels.parquet", LABEL_SCHEMA, labels)
    write_table(out / "pairs.parquet", PAIR_SCHEMA, pairs)

    report = {
        "domain": context.domain,
        **summary(forest, labels, pairs, difficulty),
        **({"model_rollouts": dynamics.metrics} if dynamics is not None else {}),
        **fit_models(context, policy, forest.rows, pairs, params),
    }
    if params.judge_model.kind != "none":
        report["judge_model"] = fit_judge_model(context, policy, domain, tasks, forest.rows, pairs, params.judge_model, out)
    write_json(context.reports / "annotate" / f"{context.domain}.json", report)
    log(context, report)
    Checkpoints(context).clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("annotate", run, params, open_tracker, per_domain=True, sharded=True, forked=has_trees))
