"""evaluate: base, sft, every specialist, the merged model and the linear average play the same frozen panels (or validation
tasks: evaluate.split). Models that select actions with a learnt scorer play the panels of the domains that have one.

data/curated/<domain> and data/transfer/<domain> (panel.json, tasks, worlds), the models and their scorers
(data/models/q/<domain>, data/models/rl/<domain>/value) -> data/evaluation/rows.parquet (one row per model, task and attempt, and
of teams with members replaced if evaluate.attribution is set), the episodes behind them (data/evaluation/episodes.parquet,
without those of such teams), reports/evaluation.json, reports/evaluation.csv, reports/metrics.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from stages import params
from stages.agent.environment_pool import processes_beside
from stages.curation.panel import Panel
from stages.engine.engine import EngineSettings, Sampling
from stages.environments.registry import open_domain, returns_of
from stages.evaluation.panels import EVALUATION_SCHEMA, Job, Outcome, Settings, load_panels, play, unload
from stages.evaluation.plan import model_folders, plan_jobs
from stages.evaluation.scorers import played_domains
from stages.evaluation.search_returns import check_search
from stages.evaluation.stored_episodes import FILE as EPISODES
from stages.evaluation.stored_episodes import write_played
from stages.evaluation.summary import csv_lines, headline, report
from stages.records.episode import write_json, write_table
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.files import atomic_text
from stages.runtime.stage import StageContext, stage_run
from stages.runtime.unlisted_domains import keep_only
from stages.tracking import flatten, open_tracker


def play_all(context: StageContext, jobs_by_model: Mapping[str, Sequence[Job]], settings: Settings) -> dict[str, Outcome]:
    """Job name -> outcome, of the jobs that this process plays. Each finished job is a checkpoint and is not played again."""
    checkpoints = Checkpoints(context, classes=(Outcome,))
    jobs: dict[str, tuple[str, Job]] = {}
    for model, of_model in jobs_by_model.items():
        for job in of_model:
            jobs.setdefault(job.name, (model, job))  # identical models share their jobs
    outcomes: dict[str, Outcome] = {}
    with context.progress("playing panels", total=sum(job.episodes for _, job in jobs.values()), unit="episode") as bar:
        for model, job in context.share(list(jobs.values())):
            outcome: Outcome | None = checkpoints.load(job.name)
            if outcome is None:
                outcome = play(job, settings)
                checkpoints.save(job.name, outcome)
                success = sum(row["success"] for row in outcome.rows) / len(outcome.rows)
                bar.advance(job.episodes, f"model {model}, domain {job.domain}: {success:.0%} success")
            else:
                bar.restore(job.episodes)
            outcomes[job.name] = outcome
    unload()
    return outcomes


def coalitions_of(
    context: StageContext, jobs_by_model: Mapping[str, Sequence[Job]], panels: Mapping[str, Panel]
) -> dict[str, list[Job]]:
    """The jobs of evaluate.attribution, by the coalition's name; {} without it."""
    evaluate = context.params.evaluate
    if evaluate.attribution is None:
        return {}
    from stages.evaluation.coalitions import coalition_jobs

    return coalition_jobs(jobs_by_model, evaluate.attribution, panels, evaluate.scaffold, context.params.seed)


def log(context: StageContext, evaluation: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> None:
    """Log metrics, files and a few of the merged model's episodes to MLflow."""
    for model, by_domain in evaluation["models"].items():
        for domain, values in by_domain.items():
            context.metric(f"success/{domain}/{model}", values["success"]["mean"])
            context.metric(f"reward/{domain}/{model}", values["reward"]["mean"])
    context.tracker.headline(flatten(headline(evaluation)))
    for episodes in samples.values():
        context.tracker.episodes(episodes, "merged, frozen panel", "merged")
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


def prune(context: StageContext) -> None:
    """Remove what unlisted domains left in the inputs."""
    params = context.params
    keep_only(context.root, params.domains, ["data/curated", "data/models/q", "data/models/rl"])
    keep_only(context.root, params.evaluate.transfer, ["data/transfer"])


def run(context: StageContext) -> None:
    params, evaluate = context.params, context.params.evaluate
    panels = load_panels(context.data / "curated", params.domains, evaluate.split)
    if evaluate.split == "test":  # panels of evaluate.transfer choose no settings
        panels |= load_panels(context.data / "transfer", evaluate.transfer, made_by="transfer")
    for domain, panel in panels.items():
        # Fail here, not in a worker, if something is missing.
        check_search(evaluate, domain, returns_of(open_domain(domain, panel.environment)))

    # Play: every model on the panels of its domains.
    folders = model_folders(context)
    domains = {name: played_domains(context.data / "models", params.domains, list(panels), name) for name in folders}
    jobs_by_model = plan_jobs(context, panels, folders, domains)
    settings = Settings(
        seed=params.seed,
        sampling=Sampling(**evaluate.sampling.model_dump()),
        engine=EngineSettings.of(params.resources, params.model.max_length, params.model.thinking),
        scaffold=evaluate.scaffold,
        environment_processes=processes_beside(params.resources),
    )
    coalitions = coalitions_of(context, jobs_by_model, panels)
    outcomes = play_all(context, {**jobs_by_model, **coalitions}, settings)
    if context.shard:
        return

    # Collect: one row per (model, task, attempt).
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {name: {domain: [] for domain in domains[name]} for name in folders}
    samples: dict[str, list[dict[str, Any]]] = {domain: [] for domain in panels}
    for name, of_model in jobs_by_model.items():
        for job in of_model:
            rows[name][job.domain] += [{"model": name, **row} for row in outcomes[job.name].rows]
            if name == "merged" and not samples[job.domain]:
                samples[job.domain] = outcomes[job.name].samples

    # Summarise and write.
    flat = (row for by_domain in rows.values() for of_domain in by_domain.values() for row in of_domain)
    of_teams = ({"model": name, **row} for name, of in coalitions.items() for job in of for row in outcomes[job.name].rows)
    write_table(context.data / "evaluation" / "rows.parquet", EVALUATION_SCHEMA, chain(flat, of_teams))
    parts = ((name, outcomes[job.name].episodes) for name, of_model in jobs_by_model.items() for job in of_model)
    write_played(context.root / EPISODES, parts)
    evaluation = report(
        rows,
        {domain: panel.hash for domain, panel in panels.items()},
        attempts=evaluate.attempts,
        confidence=evaluate.confidence,
        resamples=evaluate.resamples,
        seed=params.seed,
        split=evaluate.split,
    )
    if evaluate.utilities is not None:
        from stages.evaluation.utilities import utilities_of

        evaluation["utilities"] = utilities_of(context, folders, evaluate.utilities)
    write_json(context.reports / "evaluation.json", evaluation)
    atomic_text(context.reports / "evaluation.csv", "\n".join(csv_lines(evaluation)) + "\n")
    write_json(context.reports / "metrics.json", headline(evaluation))
    log(context, evaluation, samples)
    Checkpoints(context).clear()


if __name__ == "__main__":
    raise SystemExit(stage_run("evaluate", run, params, open_tracker, sharded=True, forked=True, prune=prune))
