"""evaluate: base, sft, every specialist, the merge and the linear merge play the same frozen panels (or validation tasks:
evaluate.split); those that choose among actions by what is learnt play the panels of the domains that have learnt it.

data/curated/<domain> (panel.json, tasks, worlds), the models and, for those that choose by it, data/models/q/<domain> or
data/models/rl/<domain>/value -> data/evaluation/rows.parquet (one row per model, task and attempt), reports/evaluation.json,
reports/evaluation.csv, reports/metrics.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stages import params
from stages.agent.model_names import SELECTORS, model_folder, model_names
from stages.agent.player import EngineSettings
from stages.agent.scaffold import Scaffold
from stages.engine.engine import Sampling
from stages.environments.registry import open_domain
from stages.evaluation.judges import judged
from stages.evaluation.panels import EVALUATION_SCHEMA, BestOf, Job, Outcome, Settings, jobs_of, load_panels, play_each
from stages.evaluation.summary import csv_lines, headline, report
from stages.records.episode import write_json, write_table
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.domains import keep_only
from stages.runtime.files import atomic_text
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import flatten, open_tracker


def model_folders(context: StageContext) -> dict[str, Path]:
    """Name -> folder of every model that is evaluated (evaluate.models), in the order of the run, each before those that choose
    among its actions."""
    folders = {name: model_folder(name, context.root, context.params) for name in model_names(context.params.domains)}
    wanted = context.params.evaluate.models or list(folders)
    players = {
        f"{name}{how}": folder for name, folder in folders.items() for how in ("", *(f"+{choice}" for choice in SELECTORS))
    }
    return {name: folder for name, folder in players.items() if name in wanted}


def choosing(context: StageContext, name: str) -> BestOf | None:
    """How the model called `name` chooses among its actions, if it does."""
    _, plus, by = name.partition("+")
    return BestOf.of(by, context.params.evaluate, context.data / "models") if plus else None


def play_all(context: StageContext, jobs: list[Job], settings: Settings) -> dict[str, Outcome]:
    """Job name -> outcome: play what no checkpoint holds yet, and keep each finished job as a checkpoint."""
    checkpoints = Checkpoints(context, classes=(Outcome,))
    outcomes: dict[str, Outcome] = {}
    resources = context.params.resources
    with context.progress("playing panels", total=sum(job.episodes for job in jobs), unit="episode") as bar:
        waiting = []
        for job in jobs:
            saved = checkpoints.load(job.name)
            if saved is None:
                waiting.append(job)
            else:
                outcomes[job.name] = saved
                bar.restore(job.episodes)
        workers = min(resources.workers, len(waiting))
        for job, outcome in play_each(waiting, settings, workers, resources.threads):
            checkpoints.save(job.name, outcome)
            outcomes[job.name] = outcome
            success = sum(row["success"] for row in outcome.rows) / len(outcome.rows)
            bar.advance(job.episodes, f"{job.folder.name} on {job.domain}: {success:.0%}")
    return outcomes


def log(context: StageContext, evaluation: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> None:
    """Numbers, files and a few of the merged model's episodes for MLflow."""
    for model, by_domain in evaluation["models"].items():
        for domain, values in by_domain.items():
            context.metric(f"success/{domain}/{model}", values["success"]["mean"])
            context.metric(f"reward/{domain}/{model}", values["reward"]["mean"])
    context.tracker.headline(flatten(headline(evaluation)))
    for episodes in samples.values():
        context.tracker.episodes(episodes, "merged, frozen panel")
    for name in ("evaluation.json", "evaluation.csv", "metrics.json"):
        context.artifact(context.reports / name)
    if "merged" not in evaluation["models"] or context.params.evaluate.split != "test":
        return
    evaluate = context.params.evaluate
    settings = {
        "model": "merged",
        "seed": context.params.seed,
        **evaluate.model_dump(include={"confidence", "resamples", "sampling"}),
    }
    context.tracker.register_model(context.data / "models" / "merged", context.data / "evaluation" / "rows.parquet", settings)


def run(context: StageContext) -> None:
    from stages.agent.policy import check_folder, policy_hash

    params, evaluate = context.params, context.params.evaluate
    if not context.shard:
        keep_only(context.root, params.domains, ["data/curated", "data/models/q", "data/models/rl", "data/packages/environments"])
    curated = context.data / "curated"
    panels = load_panels(curated, params.domains, evaluate.split)
    for domain, panel in panels.items():  # here, since workers would say nothing of what they found
        open_domain(domain, panel.environment)

    # Models with the same weights are played once.
    folders = model_folders(context)
    hashes, played = {}, {name: judged(context.data / "models", params.domains, name.partition("+")[2]) for name in folders}
    for name, folder in folders.items():
        check_folder(folder)
        best_of = choosing(context, name)
        hashes[name] = best_of.hash(policy_hash(folder), played[name]) if best_of else policy_hash(folder)
    jobs_by_hash = {}
    for name, digest in hashes.items():
        if digest in jobs_by_hash:
            same = next(other for other in hashes if hashes[other] == digest)
            print(f"evaluate: {name} is the same model as {same}; it is played once", file=sys.stderr)
        else:
            size, of_model = (evaluate.attempts, evaluate.chunk), {domain: panels[domain] for domain in played[name]}
            jobs_by_hash[digest] = jobs_of(folders[name], digest, of_model, curated, *size, choosing(context, name))
    settings = Settings(
        seed=params.seed,
        sampling=Sampling(**evaluate.sampling.model_dump()),
        engine=EngineSettings.of(params.resources, params.model.max_length, params.model.thinking),
        scaffold=Scaffold(**evaluate.scaffold.model_dump()),
    )
    jobs = [job for of_model in jobs_by_hash.values() for job in of_model]
    if context.shard:
        play_all(context, [job for number, job in enumerate(jobs) if context.shard.owns(number)], settings)
        return
    outcomes = play_all(context, jobs, settings)

    # One row per (model, task, attempt).
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {name: {domain: [] for domain in played[name]} for name in folders}
    samples: dict[str, list[dict[str, Any]]] = {domain: [] for domain in panels}
    for name, digest in hashes.items():
        for job in jobs_by_hash[digest]:
            rows[name][job.domain] += [{"model": name, **row} for row in outcomes[job.name].rows]
            if name == "merged" and not samples[job.domain]:
                samples[job.domain] = outcomes[job.name].samples
    write_table(
        context.data / "evaluation" / "rows.parquet",
        EVALUATION_SCHEMA,
        (row for by_domain in rows.values() for of_domain in by_domain.values() for row in of_domain),
    )
    evaluation = report(
        rows,
        {domain: panel.hash for domain, panel in panels.items()},
        attempts=evaluate.attempts,
        confidence=evaluate.confidence,
        resamples=evaluate.resamples,
        seed=params.seed,
    )
    write_json(context.reports / "evaluation.json", evaluation)
    atomic_text(context.reports / "evaluation.csv", "\n".join(csv_lines(evaluation)) + "\n")
    write_json(context.reports / "metrics.json", headline(evaluation))
    log(context, evaluation, samples)
    Checkpoints(context).clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("evaluate", run, params, open_tracker, sharded=True))
