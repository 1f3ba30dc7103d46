"""Which models evaluate plays on which panels."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stages.agent.instructions import QUESTION, read_instruction
from stages.agent.model_names import ENVIRONMENTS, FEW_SHOT, SEARCH, SELECTORS, VARIANTS, model_folder, model_names
from stages.curation.panel import Panel
from stages.evaluation.examples import shortest
from stages.evaluation.panels import BestOf, Job, jobs_of
from stages.runtime.stage import StageContext


def model_folders(context: StageContext) -> dict[str, Path]:
    """Name -> folder of every evaluated model (evaluate.models), in the order of the run, each before its variants that select
    actions with a scorer or play without tools."""
    folders = {name: model_folder(name, context.root, context.params) for name in model_names(context.params.domains)}
    requested = context.params.evaluate.models or list(folders)
    players = {f"{name}{how}": folder for name, folder in folders.items() for how in ("", *(f"+{choice}" for choice in VARIANTS))}
    return {name: folder for name, folder in players.items() if name in requested}


def choosing(context: StageContext, name: str) -> BestOf | None:
    """How the model `name` selects actions with a scorer, if it does."""
    _, plus, by = name.partition("+")
    return BestOf.of(by, context.params.evaluate, context.data / "models") if plus and by in SELECTORS else None


def plan_jobs(
    context: StageContext, panels: Mapping[str, Panel], folders: Mapping[str, Path], domains: Mapping[str, Sequence[str]]
) -> dict[str, list[Job]]:
    """Model name -> jobs, one list for models with the same weights, selector and instruction, which are played once."""
    from stages.agent.policy import check_folder, policy_hash
    from stages.evaluation.team_episodes import team_hash

    evaluate, curated = context.params.evaluate, context.data / "curated"

    def where(domain: str) -> Path:
        return context.data / ("transfer" if domain in evaluate.transfer else "curated")

    jobs: dict[str, list[Job]] = {}
    first: dict[str, str] = {}
    for name, folder in folders.items():
        check_folder(folder)
        best_of = choosing(context, name)
        variant = name.partition("+")[2]
        digest = best_of.hash(policy_hash(folder), domains[name]) if best_of else policy_hash(folder)
        if variant in (*ENVIRONMENTS, SEARCH):
            how = evaluate.search.model_dump_json() if variant == SEARCH else ""
            digest = hashlib.sha256(f"{digest}+{variant}{how}".encode()).hexdigest()[:16]
        own = {domain: text for domain in domains[name] if (text := read_instruction(folder, domain)) != QUESTION}
        digest = team_hash(digest, folder, domains[name])
        shown = {}
        for domain in domains[name] if variant == FEW_SHOT else ():
            if panels[domain].environment.get("constraint"):
                raise ValueError(
                    f"evaluate.models: {name} is shown turns of others, which the constraint of {domain} would count as its own; "
                    f"leave it out, or set per_domain.{domain}.environment.constraint to null"
                )
            shown[domain] = shortest(curated / domain, evaluate.examples)
        plain = bool(shown) and evaluate.examples_as == "text"
        for text in (*own.values(), *shown.values(), *(["text"] if plain else [])):
            digest = hashlib.sha256(f"{digest}+{text}".encode()).hexdigest()[:16]
        same = first.setdefault(digest, name)
        if same != name:
            if not context.shard:  # the shards leave it to the stage
                print(f"evaluate: {name} is identical to {same}; it is played once", file=sys.stderr)
            jobs[name] = jobs[same]
            continue
        size = (evaluate.attempts, evaluate.chunk)
        of_model = [
            job
            for domain in domains[name]
            for job in jobs_of(folder, digest, {domain: panels[domain]}, where(domain), *size, best_of)
        ]
        jobs[name] = [
            replace(job, instruction=own.get(job.domain, QUESTION), examples=shown.get(job.domain, ()), plain=plain)
            for job in of_model
        ]
        if variant in ENVIRONMENTS:
            jobs[name] = [replace(job, environment={**job.environment, **ENVIRONMENTS[variant]}) for job in jobs[name]]
        if variant == SEARCH:
            jobs[name] = [replace(job, search=evaluate.search) for job in jobs[name]]
    return jobs
