"""rl: the SFT policy learns one domain by playing it. Each step: draw tasks, play them in groups, credit the tokens, update.

data/models/sft, data/curated/<domain>, data/rollouts/<domain>/difficulty.json (and data/annotated/<domain>/value_model for
credit.kind annotated) -> data/models/rl/<domain>, data/rl/<domain>/samples.parquet, reports/rl/<domain>{_history.csv,.json}.
Under LoRA (model.lora) data/models/rl/<domain> is an adapter folder whose base is data/models/sft.
"""

from __future__ import annotations

from stages.agent.episode import EPISODE_SCHEMA, write_json, write_table
from stages.checkpoints import Checkpoints
from stages.environments.registry import load_domain
from stages.params import Rl
from stages.runtime import StageContext, stage_run

START = "data/models/sft"
"""The policy to start from, below the repository's root."""


def run(context: StageContext) -> None:
    import pyarrow as pa

    from stages.agent.policy import load_policy, save_policy
    from stages.agent.rollout import EnvironmentPool
    from stages.algorithms.compose import resolve
    from stages.training.adapters import prepare_model, save_adapters, weight_precision
    from stages.training.loop import run_loop, write_history
    from stages.training.reinforcement import RlJob

    assert context.domain is not None
    section: Rl = context.section("rl")
    algorithm = resolve(section)
    context.log_params(algorithm.rl.model_dump())
    domain = load_domain(context.domain, context.params.per_domain[context.domain].environment)
    worlds = context.data / "curated" / context.domain / "worlds"
    precision = weight_precision(context.params)
    policy = load_policy(context.root / START, device=context.params.resources.device, precision=precision, attention="sdpa")
    prepare_model(policy.model, context.params, context.title)

    checkpoints = Checkpoints(context)
    with EnvironmentPool(lambda: domain.make(worlds)) as pool:
        job = RlJob(context, algorithm, policy, pool)
        history = run_loop(context, checkpoints, job, section.steps, section.checkpoint_every, "training")

    folder = context.data / "models" / "rl" / context.domain
    if context.params.model.lora.rank:
        save_adapters(policy.model, policy.tokenizer, folder, base=START)
    else:
        save_policy(policy.model, policy.tokenizer, folder)
    sample_schema = pa.schema([*EPISODE_SCHEMA, ("step", pa.int32()), ("advantages", pa.list_(pa.float32()))])
    write_table(context.data / "rl" / context.domain / "samples.parquet", sample_schema, job.samples)
    for step in sorted({sample["step"] for sample in job.samples}):
        context.tracker.episodes([sample for sample in job.samples if sample["step"] == step], f"step {step}")
    history_path = context.reports / "rl" / f"{context.domain}_history.csv"
    write_history(history_path, history)
    window = max(1, len(history) // 5)
    report = {
        "algorithm": algorithm.card.slug,
        "credit": section.credit.kind,
        "steps": len(history),
        "episodes": len(history) * section.tasks_per_step * section.group_size,
        "environment_steps": int(sum(row["environment_steps"] for row in history)),
        "success_first": sum(row["success"] for row in history[:window]) / window,
        "success_last": sum(row["success"] for row in history[-window:]) / window,
        "kl_last": history[-1]["kl"],
        "dead_groups": sum(row["dead_groups"] for row in history) / (len(history) * section.tasks_per_step),
        **job.apart,
        "start_hash": policy.hash,
        **job.ledger.metrics(),
    }
    report_path = context.reports / "rl" / f"{context.domain}.json"
    write_json(report_path, report)
    context.artifact(report_path)
    context.artifact(history_path)
    checkpoints.clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("rl", run, per_domain=True))
