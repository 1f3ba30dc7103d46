"""curate: raw records of one domain become tasks, demonstrations, a frozen evaluation panel and a data report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stages import params
from stages.curation import messages
from stages.curation.assemble import assemble
from stages.curation.datareport import data_report, shortages
from stages.curation.demonstrations import DemonstrationPlan, Demonstrations, check_expert, demonstrate_all
from stages.curation.games import Games, read_games
from stages.curation.imports import Importer, Imports
from stages.curation.panel import make_panel, write_panel
from stages.curation.settings import Curate
from stages.curation.source import read_source
from stages.environments.protocol import Domain
from stages.environments.registry import open_domain
from stages.records.episode import write_episodes, write_json, write_table, write_tasks
from stages.records.preferences import PREFERENCE_SCHEMA
from stages.records.task import SPLITS, Split, Task
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker


def warn(name: str, lines: Iterable[object]) -> None:
    messages.warn(f"curate@{name}", lines, f"reports/curate/{name}.json")


def demonstrate(context: StageContext, domain: Domain, worlds: Path, tasks: Sequence[Task], curate: Curate) -> Demonstrations:
    """Demonstrations of the training tasks, and of the validation tasks for early stopping; never of test tasks."""
    resources = context.params.resources
    plan = DemonstrationPlan(curate, context.params.seed, context.params.model.max_length, context.params.model.thinking)
    chosen = [task for task in tasks if task.split != "test"]
    demonstrations = Demonstrations()
    with context.progress("demonstrating", total=len(chosen), unit="task") as bar:
        for of_task in demonstrate_all(domain, worlds, chosen, plan, resources.workers):
            demonstrations.add(of_task)
            bar.advance(1)
    return demonstrations


def game_records(context: StageContext, domain: Domain, worlds: Path, tasks: Sequence[Task]) -> Games | None:
    """Other players' games of the training tasks, from data/raw/<domain>.games.jsonl if that exists."""
    name = context.domain
    path = context.data / "raw" / f"{name}.games.jsonl"
    if not path.exists():
        return None
    games = read_games(path, domain, worlds, [task for task in tasks if task.split == "train"])
    remedy = f"to make the file again, run 'python -m stages.curation games {name} --count N > data/raw/{name}.games.jsonl'"
    counts = sorted(games.rejected.items())
    warn(str(name), (f"data/raw/{name}.games.jsonl: {count} games skipped: {reason}; {remedy}" for reason, count in counts))
    return games


def log(context: StageContext, report: Mapping[str, Any], rejected: int, shown: Demonstrations, imports: Imports) -> None:
    for split in SPLITS:
        context.metric(f"curate/kept_{split}", report["splits"][split]["kept"])
    context.metric("curate/rejected", rejected)
    context.metric("curate/demonstrations", len(shown.episodes))
    context.metric("curate/imported", len(imports.episodes) + len(imports.pairs))
    context.artifact(context.reports / "curate" / f"{context.domain}.json")


def run(context: StageContext) -> None:
    assert context.domain is not None
    params, name = context.params, context.domain
    curate: Curate = params.section("curate", name)
    domain = open_domain(name, params.per_domain[name].environment)
    sizes: dict[Split, int] = {split: getattr(curate, split) for split in SPLITS}
    context.log_params({"curate": curate.model_dump(), "environment": domain.settings.model_dump(mode="json")})

    # Read: every line becomes a record or a rejection that names it.
    source = read_source(domain, context.data / "raw" / f"{name}.jsonl", sizes, params.seed, curate.seeds)
    warn(name, source.warnings)

    # Build and clean.
    folder = context.data / "curated" / name
    worlds = folder / "worlds"
    bar = partial(context.progress, "building", unit="task")
    assembly = assemble(domain, source.records, sizes, worlds, params.resources.workers, params.model.max_length, bar)
    rejections = source.rejections + assembly.rejections
    tasks = assembly.tasks
    warn(name, (f"rejected {rejection}" for rejection in rejections))
    warn(name, shortages(tasks, sizes, source.labels))
    missing = [split for split in SPLITS if not any(task.split == split for task in tasks)]
    if missing:
        label = ", ".join(sorted({source.labels[split] for split in missing}))
        raise ValueError(f"{label} gives no usable task for {', '.join(missing)}; see the rejections above")

    # Demonstrate, read other players' games, and import demonstrations and preference pairs.
    demonstrations = demonstrate(context, domain, worlds, tasks, curate)
    expert_warnings = check_expert(name, demonstrations, curate)
    warn(name, expert_warnings)
    games = game_records(context, domain, worlds, tasks)
    imports = Imports()
    if curate.imports:
        importer = Importer(domain, tasks, worlds, params.model.max_length, params.model.thinking)
        imports = importer.read(context.root, curate.imports)
    warn(name, imports.warnings())

    # Write the data, with the frozen panel of the test tasks, ...
    panel = make_panel(domain, tasks, worlds)
    write_tasks(folder / "tasks.parquet", tasks)
    write_episodes(folder / "demonstrations.parquet", [*demonstrations.episodes, *imports.episodes])
    if imports.pairs:
        write_table(folder / "pairs.parquet", PREFERENCE_SCHEMA, imports.pairs)
    if games is not None:
        write_episodes(folder / "games.parquet", games.episodes)
    write_panel(folder / "panel.json", panel)

    # ... and the report.
    summary = source.summary(assembly.unused, expert_warnings)
    report = data_report(summary, tasks, sizes, [*rejections, *imports.rejections], demonstrations, panel)
    if curate.imports:
        report["imports"] = imports.report()
    if games is not None:
        report["games"] = games.report()
    write_json(context.reports / "curate" / f"{name}.json", report)
    log(context, report, len(rejections), demonstrations, imports)


if __name__ == "__main__":
    raise SystemExit(stage_run("curate", run, params, open_tracker, per_domain=True))
