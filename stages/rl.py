"""rl: the SFT policy learns one domain: by playing it, from recorded episodes, or from the preference pairs of tree search, as
`rl.algorithm` says.

Playing, each step: draw tasks, play them in groups, credit the tokens, update. Pairs, records and stored episodes, each step:
updates over some of them. Reads data/models/sft, data/rollouts/<domain>/difficulty.json, and, as the algorithm asks,
data/curated/<domain> (demonstrations for external.per_group, these and game records for replay.records), the episodes in
data/rollouts/<domain> (for replay.records and algorithms of stored episodes) and data/annotated/<domain> (value_model for
credit.kind annotated, critic.init and curriculum.kind value; progress_model for credit.kind progress; nodes and pairs for
algorithms that learn from pairs). Writes data/models/rl/<domain> (with value/ where values of tokens were learnt),
data/rl/<domain>/samples.parquet, reports/rl/<domain>{_history.csv,.json}.
Under LoRA (model.lora) data/models/rl/<domain> is an adapter folder whose base is data/models/sft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages import params
from stages.algorithms.parts.critic import check_returns
from stages.algorithms.settings import Rl
from stages.environments.registry import load_domain, open_domain, returns_of
from stages.records.episode import EPISODE_SCHEMA, Episode, TurnRecord, write_json, write_table
from stages.records.sections import seed_of
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker

if TYPE_CHECKING:
    from stages.agent.policy import Policy
    from stages.algorithms.algorithm import Algorithm
    from stages.environments.protocol import Domain
    from stages.training.processes import Processes
    from stages.training.rl.models import Models
    from stages.values.token_q import TokenQ

START = "data/models/sft"
"""The policy to start from, below the repository's root."""


@dataclass
class Learnt:
    """What training gave: its models, the history, sample episodes and the report's own lines."""

    models: Models
    history: list[dict[str, float]]
    samples: list[dict[str, Any]]
    report: dict[str, Any]
    token_q: TokenQ | None = None
    """What is saved beside the policy, where values of tokens were learnt."""


def learn_by_playing(
    context: StageContext, domain: Domain, algorithm: Algorithm, policy: Policy, checkpoints: Checkpoints, processes: Processes
) -> Learnt:
    """Train on episodes that the policy plays."""
    from stages.agent.rollout import EnvironmentPool
    from stages.training.loop import run_loop
    from stages.training.rl.reinforcement import RlJob

    assert context.domain is not None
    worlds = context.data / "curated" / context.domain / "worlds"
    rl = algorithm.rl
    check_returns(rl, *returns_of(domain))
    with EnvironmentPool(lambda: domain.make(worlds)) as pool:
        job = RlJob(context, algorithm, policy, pool, domain.settings.max_turns, processes)
        history = run_loop(context, checkpoints, job, rl.steps, rl.checkpoint_every, "training")
    window = max(1, len(history) // 5)
    report = {
        "credit": rl.credit.kind,
        "episodes": int(sum(row["episodes"] for row in history)),
        "environment_steps": int(sum(row["environment_steps"] for row in history)),
        "success_first": sum(row["success"] for row in history[:window]) / window,
        "success_last": sum(row["success"] for row in history[-window:]) / window,
        "kl_last": history[-1]["kl"],
        "dead_groups": sum(row["dead_groups"] for row in history) / sum(row["groups"] for row in history),
        **job.apart,
        **job.ledger.metrics(),
    }
    return Learnt(job.models, history, job.samples, report)


def learn_from_pairs(
    context: StageContext, domain: Domain, algorithm: Algorithm, policy: Policy, checkpoints: Checkpoints, processes: Processes
) -> Learnt:
    """Train on stored pairs; no samples."""
    from stages.training.loop import run_loop
    from stages.training.rl.preference import PreferenceJob

    job = PreferenceJob(context, algorithm, policy, processes)
    history = run_loop(context, checkpoints, job, algorithm.rl.steps, algorithm.rl.checkpoint_every, "training")
    report = {
        "environment_steps": 0,
        "pairs": len(job.pairs),
        "passes": len(history) * job.per_step / len(job.pairs),
        "pair_accuracy_first": history[0]["pair_accuracy"],
        "pair_accuracy_last": history[-1]["pair_accuracy"],
        **job.ledger.metrics(),
    }
    return Learnt(job.models, history, [], report)


def learn_from_stored(
    context: StageContext, domain: Domain, algorithm: Algorithm, policy: Policy, checkpoints: Checkpoints, processes: Processes
) -> Learnt:
    """Train on stored episodes; no samples."""
    from stages.training.loop import run_loop
    from stages.training.rl.stored import StoredJob

    assert context.domain is not None
    job = StoredJob(context, algorithm, policy, processes, domain)
    history = run_loop(context, checkpoints, job, algorithm.rl.steps, algorithm.rl.checkpoint_every, "training")
    report: dict[str, Any] = job.report()
    for column in ("value_td", "td"):
        found = [row[column] for row in history if column in row]
        window = max(1, len(found) // 5)
        if found:
            report |= {f"{column}_first": sum(found[:window]) / window, f"{column}_last": sum(found[-window:]) / window}
    return Learnt(job.models, history, [], report, job.token_q())


def learn_from_records(
    context: StageContext, domain: Domain, algorithm: Algorithm, policy: Policy, checkpoints: Checkpoints, processes: Processes
) -> Learnt:
    """Train on recorded episodes; no samples."""
    from stages.training.loop import run_loop
    from stages.training.rl.recorded import RecordedJob

    assert context.domain is not None
    check_returns(algorithm.rl, *returns_of(domain))
    job = RecordedJob(context, algorithm, policy, processes)
    history = run_loop(context, checkpoints, job, algorithm.rl.steps, algorithm.rl.checkpoint_every, "training")
    report = {
        "environment_steps": 0,
        "records": {kind: len(episodes) for kind, episodes in job.records.items()},
        "replayed_turns": job.off_policy.replay.turns,
        "td_error_first": history[0]["td_error"],
        "td_error_last": history[-1]["td_error"],
        "kl_last": history[-1]["kl"],
        **job.ledger.metrics(),
    }
    return Learnt(job.models, history, [], report)


LEARN = {
    "episodes": learn_by_playing,
    "records": learn_from_records,
    "pairs": learn_from_pairs,
    "stored": learn_from_stored,
}
"""By what the algorithm learns from (stages.algorithms.card.Composition.data)."""


def run(context: StageContext) -> None:
    import pyarrow as pa

    from stages.agent.policy import load_policy, save_policy
    from stages.algorithms.algorithm import resolve
    from stages.training.adapters import prepare_model, save_adapters, weight_precision
    from stages.training.loop import make_processes, write_history

    assert context.domain is not None
    section: Rl = context.section("rl")
    algorithm = resolve(section, context.params.model.max_length)
    context.log_params(algorithm.rl.model_dump())
    precision = weight_precision(context.params)
    processes = make_processes(context.params.resources)
    # Only what plays needs all that the domain does, and is told that something is missing before a model is loaded.
    opened = open_domain if algorithm.method.data == "episodes" else load_domain
    domain = opened(context.domain, context.params.per_domain[context.domain].environment)
    policy = load_policy(context.root / START, device=str(processes.device), precision=precision, attention="sdpa")
    prepare_model(policy.model, context.params, seed_of(context.params, algorithm.rl), context.title)

    checkpoints = Checkpoints(context, classes=(Episode, TurnRecord))  # those of a replay
    learnt = LEARN[algorithm.method.data](context, domain, algorithm, policy, checkpoints, processes)
    learnt.models.refresh_player()
    if not context.main:
        return

    folder = context.data / "models" / "rl" / context.domain
    if context.params.model.lora.rank:
        save_adapters(policy.model, policy.tokenizer, folder, base=START)
    else:
        save_policy(learnt.models.player, policy.tokenizer, folder)
    if learnt.token_q is not None:
        learnt.token_q.save(folder)
    sample_schema = pa.schema([*EPISODE_SCHEMA, ("step", pa.int32()), ("advantages", pa.list_(pa.float32()))])
    write_table(context.data / "rl" / context.domain / "samples.parquet", sample_schema, learnt.samples)
    for step in sorted({sample["step"] for sample in learnt.samples}):
        context.tracker.episodes([sample for sample in learnt.samples if sample["step"] == step], f"step {step}")
    history_path = context.reports / "rl" / f"{context.domain}_history.csv"
    write_history(history_path, learnt.history)
    report_path = context.reports / "rl" / f"{context.domain}.json"
    write_json(
        report_path, {"algorithm": algorithm.card.slug, "steps": len(learnt.history), "start_hash": policy.hash, **learnt.report}
    )
    context.artifact(report_path)
    context.artifact(history_path)
    checkpoints.clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("rl", run, params, open_tracker, per_domain=True, launched=True))
