"""rl: the SFT policy learns one domain, by playing it, from the offline dataset or from search trees (`rl.algorithm`).

In each step, an algorithm that plays samples tasks, plays a group of episodes of each, assigns credit to the tokens and updates
the policy; the other algorithms update it on a batch of their data.

Reads data/models/sft, data/rollouts/<domain>/difficulty.json and, depending on the algorithm:
- data/curated/<domain>: demonstrations (external.per_group; replay.records; offline algorithms) and game records
- data/rollouts/<domain>: episodes (replay.records; offline algorithms; agent_rlvr and rejection_sft)
- data/annotated/<domain>: value_model (credit.kind annotated, critic.init, curriculum.kind value), progress_model (credit.kind
  progress), nodes and pairs (algorithms that learn from these), costs (add_tree_steps)

Writes data/models/rl/<domain> (with value/ if the algorithm learns token values, and reward/ for preference.reward_model),
data/rl/<domain>/samples.parquet (with judgments.parquet if a judge gives the rewards, guided.parquet after a guided pass) and
reports/rl/<domain>{_history.csv,.json}. Under LoRA (model.lora), data/models/rl/<domain> is an adapter of data/models/sft.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from stages import params
from stages.algorithms.parts.guidance import plays_guided
from stages.algorithms.settings import Rl
from stages.algorithms.task_source import source_class
from stages.environments.registry import load_domain, open_domain
from stages.records.episode import Episode, TurnRecord, sample_schema, write_json, write_table
from stages.records.sections import seed_of
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker

if TYPE_CHECKING:
    from stages.agent.policy import Policy
    from stages.algorithms.algorithm import Algorithm
    from stages.environments.protocol import Domain
    from stages.training.common.processes import Processes
    from stages.training.rl.guided_pass import Attempts
    from stages.training.rl.job import History, RlJob

START = "data/models/sft"
"""The policy to start from, below the repository's root."""


def make_job(
    context: StageContext,
    algorithm: Algorithm,
    policy: Policy,
    processes: Processes,
    domain: Domain,
    attempts: Attempts | None,
) -> RlJob:
    """The training job for the data that the algorithm learns from (stages.algorithms.card.Composition.data); attempts: those
    that it learns from, if it does."""
    from stages.training.rl.cloning import CloningJob
    from stages.training.rl.offline import OfflineJob
    from stages.training.rl.offline_actor_critic import OfflineActorCriticJob
    from stages.training.rl.online import OnlineJob
    from stages.training.rl.preference import PreferenceJob

    jobs: dict[str, Callable[..., RlJob]] = {
        "episodes": OnlineJob,
        "offline_replay": OfflineActorCriticJob,
        "pairs": partial(PreferenceJob, attempts=attempts),
        "paths": CloningJob,
        "attempts": partial(CloningJob, attempts=attempts),
        "offline": OfflineJob,
    }
    return jobs[algorithm.method.data](context, algorithm, policy, processes, domain)


def warm_start(
    context: StageContext, rl: Rl, policy: Policy, processes: Processes, domain: Domain, checkpoints: Checkpoints
) -> dict[str, Any] | None:
    """Train the policy as `rl.warm_start` says; returns the report, or None where it says nothing.

    The trained weights are a checkpoint, so that a restart goes on from them. Raises ValueError under FSDP, which shards a model
    for one training.
    """
    from stages.algorithms.algorithm import Algorithm
    from stages.algorithms.resolve import warm_start_of
    from stages.runtime.unshardable import WARM_START
    from stages.training.common.adapters import load_trained_state, trained_state
    from stages.training.common.loop import run_loop
    from stages.training.rl.guided_pass import read_attempts

    found = warm_start_of(rl, context.params.model.max_length)
    if found is None:
        return None
    if processes.sharded:
        raise ValueError(WARM_START)
    method, first = found
    done = checkpoints.load("warm_start_done")
    if done is not None:
        load_trained_state(policy.model, done["weights"])
        return done["report"]
    algorithm = Algorithm(method, first)
    attempts = read_attempts(context, algorithm, policy, processes, domain, checkpoints)
    job = make_job(context, algorithm, policy, processes, domain, attempts)
    history = run_loop(context, checkpoints, job, first.steps, first.checkpoint_every, "warm_start", "warm_start/")
    report = {"algorithm": method.card.slug, "steps": len(history), **job.report(history)}
    if context.main:
        checkpoints.save("warm_start_done", {"weights": trained_state(policy.model), "report": report})
    return report


def write_outputs(
    context: StageContext, algorithm: Algorithm, policy: Policy, job: RlJob, history: History, report: dict[str, Any]
) -> None:
    """Write the policy, sample episodes, history and report."""
    from stages.agent.policy import save_policy
    from stages.training.common.adapters import save_adapters
    from stages.training.common.loop import write_history

    folder = context.data / "models" / "rl" / str(context.domain)
    if context.params.model.lora.rank:
        save_adapters(policy.model, policy.tokenizer, folder, base=START)
    else:
        save_policy(job.models.player, policy.tokenizer, folder)
    job.save_values(folder)

    write_table(context.data / "rl" / str(context.domain) / "samples.parquet", sample_schema(job.samples), job.samples)
    job.save_tables(context.data / "rl" / str(context.domain))
    for step in sorted({sample["step"] for sample in job.samples}):
        context.tracker.episodes([sample for sample in job.samples if sample["step"] == step], f"step {step}", f"rl step {step}")

    report_path = context.reports / "rl" / f"{context.domain}.json"
    history_path = context.reports / "rl" / f"{context.domain}_history.csv"
    summary = {"algorithm": algorithm.card.slug, "steps": len(history), "start_hash": policy.hash}
    write_history(history_path, history)
    write_json(report_path, {**summary, **report})
    context.artifact(report_path)
    context.artifact(history_path)


def run(context: StageContext) -> None:
    from stages.agent.policy import load_policy
    from stages.algorithms.algorithm import resolve
    from stages.training.common.adapters import prepare_model, weight_precision
    from stages.training.common.loop import make_processes, run_loop
    from stages.training.rl.guided_pass import read_attempts
    from stages.training.rl.scorers import named_files

    assert context.domain is not None
    section: Rl = context.section("rl")
    algorithm = resolve(section, context.params.model.max_length)
    rl = algorithm.rl
    context.log_params(rl.model_dump())
    processes = make_processes(context.params.resources, context.team)

    # Only playing needs all that the domain requires; check for it before a model is loaded.
    plays = algorithm.method.data == "episodes" and not source_class(rl.tasks.source).recorded
    opened = open_domain if plays or plays_guided(rl) else load_domain
    domain = opened(context.domain, context.params.per_domain[context.domain].environment)
    precision = weight_precision(context.params)
    policy = load_policy(context.root / START, device=str(processes.device), precision=precision, attention="sdpa")
    prepare_model(policy.model, context.params, seed_of(context.params, rl), context.title)

    checkpoints = Checkpoints(context, named_files(rl, context.root), classes=(Episode, TurnRecord))  # the replay buffer's
    attempts = read_attempts(context, algorithm, policy, processes, domain, checkpoints)
    warm = warm_start(context, rl, policy, processes, domain, checkpoints)
    with closing(make_job(context, algorithm, policy, processes, domain, attempts)) as job:
        history = run_loop(context, checkpoints, job, rl.steps, rl.checkpoint_every)
    report = {**job.report(history), **({"warm_start": warm} if warm else {})}
    job.gather_weights()
    if not context.main:
        return
    write_outputs(context, algorithm, policy, job, history, report)
    checkpoints.clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("rl", run, params, open_tracker, per_domain=True, launched=True))
