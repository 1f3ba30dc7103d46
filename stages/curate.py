"""curate: raw records of one domain become tasks, demonstrations, a frozen evaluation panel and a data report."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from stages import params
from stages.curation.assemble import assemble
from stages.curation.datareport import data_report, shortages
from stages.curation.demonstrations import DemonstrationPlan, Demonstrations, check_expert, demonstrate_all
from stages.curation.games import read_games
from stages.curation.imports import Importer, Imports
from stages.curation.panel import make_panel, write_panel
from stages.curation.raw import make_raw, read_raw, unlike_settings
from stages.curation.settings import Curate
from stages.environments.registry import open_domain
from stages.records.episode import PREFERENCE_SCHEMA, write_episodes, write_json, write_table, write_tasks
from stages.records.task import SPLITS, Split
from stages.runtime.progress import Progress
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker


def run(context: StageContext) -> None:
    assert context.domain is not None
    params, name = context.params, context.domain
    curate: Curate = params.section("curate", name)
    domain = open_domain(name, params.per_domain[name].environment)
    asked: dict[Split, int] = {split: getattr(curate, split) for split in SPLITS}
    context.log_params({"curate": curate.model_dump(), "environment": domain.settings.model_dump(mode="json")})

    # Read: every line becomes a record or a rejection that names it.
    raw = context.data / "raw" / f"{name}.jsonl"
    label = f"data/raw/{name}.jsonl" if raw.exists() else f"recipes of domain {name}"
    records, rejections = read_raw(raw, label, domain) if raw.exists() else make_raw(domain, asked, params.seed)
    warnings = unlike_settings(records, domain, label) if raw.exists() else []
    for line in warnings:
        print(f"curate@{name}: {line}", file=sys.stderr)

    # Build and clean.
    folder = context.data / "curated" / name
    worlds = folder / "worlds"

    def show(count: int) -> AbstractContextManager[Progress]:
        return context.progress("building", total=count, unit="task")

    assembly = assemble(domain, records, asked, worlds, params.resources.workers, params.model.max_length, show)
    rejections += assembly.rejections
    tasks = assembly.tasks
    for rejection in rejections:
        print(f"curate@{name}: rejected {rejection}", file=sys.stderr)
    for line in shortages(tasks, asked, label):
        print(f"curate@{name}: {line}", file=sys.stderr)
    missing = [split for split in SPLITS if not any(task.split == split for task in tasks)]
    if missing:
        raise ValueError(f"{label} gives no usable task for {', '.join(missing)}; see the rejections above")

    # Demonstrate: training tasks to learn from, validation tasks to stop early by. Test tasks are never demonstrated.
    plan = DemonstrationPlan(curate, params.seed, params.model.max_length)
    shown = [task for task in tasks if task.split != "test"]
    demonstrations = Demonstrations()
    with context.progress("demonstrating", total=len(shown), unit="task") as bar:
        for of_task in demonstrate_all(domain, worlds, shown, plan, params.resources.workers):
            demonstrations.add(of_task)
            bar.advance(1)
    of_expert = check_expert(name, demonstrations, curate)
    for line in of_expert:
        print(f"curate@{name}: {line}", file=sys.stderr)

    # Records of games that others played, where there are any.
    games, played = None, context.data / "raw" / f"{name}.games.jsonl"
    if played.exists():
        games = read_games(played, domain, worlds, [task for task in tasks if task.split == "train"])
        for reason, count in sorted(games.rejected.items()):
            again = f"; make it again with 'python -m stages.curation games {name} --count N > data/raw/{name}.games.jsonl'"
            print(f"curate@{name}: data/raw/{name}.games.jsonl: {count} left out: {reason}{again}", file=sys.stderr)

    # What comes from elsewhere: more demonstrations, and preference pairs.
    imports = Imports()
    if curate.imports:
        importer = Importer(domain, tasks, worlds, params.model.max_length, params.model.thinking)
        imports = importer.read(context.root, curate.imports)
    for line in imports.told():
        print(f"curate@{name}: {line}", file=sys.stderr)

    # Freeze and write.
    panel = make_panel(domain, tasks, worlds)
    write_tasks(folder / "tasks.parquet", tasks)
    write_episodes(folder / "demonstrations.parquet", [*demonstrations.episodes, *imports.episodes])
    if imports.pairs:
        write_table(folder / "pairs.parquet", PREFERENCE_SCHEMA, imports.pairs)
    if games is not None:
        write_episodes(folder / "games.parquet", games.episodes)
    write_panel(folder / "panel.json", panel)
    source = {"file": label, "records": len(records), "unused": assembly.unused, "warnings": [*warnings, *of_expert]}
    report = data_report(source, tasks, asked, [*rejections, *imports.rejections], demonstrations, panel)
    if curate.imports:
        report["imports"] = imports.report()
    if games is not None:
        report["games"] = games.report()
    write_json(context.reports / "curate" / f"{name}.json", report)

    for split in SPLITS:
        context.metric(f"curate/kept_{split}", report["splits"][split]["kept"])
    context.metric("curate/rejected", len(rejections))
    context.metric("curate/demonstrations", len(demonstrations.episodes))
    context.metric("curate/imported", len(imports.episodes) + len(imports.pairs))
    context.artifact(context.reports / "curate" / f"{name}.json")


if __name__ == "__main__":
    raise SystemExit(stage_run("curate", run, params, open_tracker, per_domain=True))
