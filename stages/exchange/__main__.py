"""Exports this project's data and models in the formats of other tools:

episodes   rollouts, demonstrations, games or the panel's episodes as conversations, turns, tokens, rows for verl, ATIF
           trajectories (Harbor) or a log of Inspect
pairs      preference pairs of data/annotated/<domain>, for TRL's preference trainers
tasks      curated tasks as rows for verl; TRL's online trainers also read the column `prompt`
model      a model as a plain save_pretrained folder; a LoRA adapter is merged into its base

and imports:

import     ATIF trajectories and logs of Inspect: as conversations for curate.imports, or, if exported here, as episodes again
gguf       the model in a GGUF file, or in a package that has one, as a save_pretrained folder
terms      the terms of such packages; the exit code is 2 unless they are accepted
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stages.environments.registry import load_domain
from stages.evaluation.stored_episodes import FILE, played_groups, stored_groups
from stages.exchange.documents import DOCUMENTS, document_kinds, write_documents
from stages.exchange.episodes import FORMATS, episode_rows, task_row
from stages.exchange.foreign import read_items
from stages.exchange.records import KINDS, check_kind, write_records
from stages.params import Params, load_params
from stages.records.episode import Episode, episode_from, read_episodes, read_rows, read_tasks, write_episodes
from stages.records.task import SPLITS, Task, opening
from stages.runtime.command import command

PANEL, MERGED = "panel", "merged"
SOURCES = {
    "rollouts": ("data/rollouts/{}/episodes.parquet", "rollout"),
    "demonstrations": ("data/curated/{}/demonstrations.parquet", "curate"),
    "games": ("data/curated/{}/games.parquet", "curate"),
}
"""Source -> file of its episodes, and the stage that writes it; PANEL, besides, are those of a model in the evaluation."""


def existing(path: Path, stage: str) -> Path:
    """`path`. Raises FileNotFoundError, naming the stage that writes it, if it does not exist."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; 'dvc repro {stage}' writes it if the domain has such data")
    return path


def curated(root: Path, domain: str) -> dict[str, Task]:
    """The domain's tasks by id."""
    path = existing(root / "data/curated" / domain / "tasks.parquet", f"curate@{domain}")
    return {task.task_id: task for task in read_tasks(path)}


def chosen_episodes(root: Path, options: argparse.Namespace) -> list[Episode]:
    """The episodes that the command line names. Raises FileNotFoundError; ValueError for --model without any or effect."""
    episodes: list[Episode]
    if options.source == PANEL:
        path, model = existing(root / FILE, "evaluate"), options.model or MERGED
        played = dict(played_groups(path, options.domain, [model]))
        if not played:
            known = ", ".join(sorted(model for model, domain in stored_groups(path) if domain == options.domain))
            raise ValueError(f"--model {model} has no episodes of {options.domain}; those that have some: {known}")
        ordered = sorted(played[model], key=lambda row: (row["task_id"], row["attempt"]))
        beside = ("model", "attempt")
        episodes = [episode_from({name: row[name] for name in row if name not in beside}) for row in ordered]
    elif options.model is not None:
        raise ValueError(f"--model names whose episodes of the panel; add --source {PANEL}, or leave --model out")
    else:
        pattern, stage = SOURCES[options.source]
        path = existing(root / pattern.format(options.domain), f"{stage}@{options.domain}")
        episodes = read_episodes(path)
        if not episodes and stage == "rollout":
            raise ValueError(
                f"{path} has no episodes: set rollout.tasks to a number above 0, such as 96, and run 'dvc repro "
                f"rollout@{options.domain}', or choose another --source"
            )
    return [episode for episode in episodes if episode.success] if options.successes else episodes


def export_episodes(root: Path, params: Params, options: argparse.Namespace) -> list[dict[str, Any]]:
    episodes = chosen_episodes(root, options)
    tasks = curated(root, options.domain) if options.format == "verl" else {}
    return episode_rows(episodes, options.format, tasks)


def export_pairs(root: Path, params: Params, options: argparse.Namespace) -> list[dict[str, Any]]:
    from stages.exchange.preferences import preference_rows

    folder = root / "data/annotated" / options.domain
    tables = {name: read_rows(existing(folder / f"{name}.parquet", f"annotate@{options.domain}")) for name in ("nodes", "pairs")}
    if not tables["pairs"]:
        raise ValueError(
            f"{folder / 'pairs.parquet'} has no pairs: set annotate.tasks to a number above 0, such as 48, and run 'dvc repro "
            f"annotate@{options.domain}'; with trees, raise it or annotate.iterations, or lower annotate.pairs.min_margin"
        )
    return preference_rows(tables["nodes"], tables["pairs"], curated(root, options.domain), options.level)


def export_tasks(root: Path, params: Params, options: argparse.Namespace) -> list[dict[str, Any]]:
    domain = load_domain(options.domain, params.per_domain[options.domain].environment)
    environment = domain.make(root / "data/curated" / options.domain / "worlds")
    tasks = [task for task in curated(root, options.domain).values() if task.split == options.split]
    rows = [task_row(task, opening(task.prompt, environment.reset(task).text), index) for index, task in enumerate(tasks)]
    environment.close()
    return rows


TABLES: Mapping[str, Callable[[Path, Params, argparse.Namespace], list[dict[str, Any]]]] = {
    "episodes": export_episodes,
    "pairs": export_pairs,
    "tasks": export_tasks,
}


IMPORTS = ("import", "gguf", "terms")
"""Commands that export nothing."""


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stages.exchange", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for what in TABLES:
        command = commands.add_parser(what)
        command.add_argument("--domain", required=True, help="one of `domains` in params.yaml")
        kinds = f"{' or '.join(KINDS)}; {document_kinds()}" if what == "episodes" else " or ".join(KINDS)
        command.add_argument("--to", required=True, help=f"the file to write: {kinds}")
        if what == "episodes":
            sources, formats = [*SOURCES, PANEL], [*FORMATS, "verl", *DOCUMENTS]
            command.add_argument("--source", choices=sources, default="rollouts", help="which episodes (default: %(default)s)")
            command.add_argument("--model", help=f"with --source {PANEL}: whose (default: {MERGED})")
            command.add_argument("--format", choices=formats, default="messages", help="(default: %(default)s)")
            command.add_argument("--successes", action="store_true", help="only episodes that solved their task")
        elif what == "pairs":
            command.add_argument(
                "--level", choices=("step", "trajectory"), default="step", help="single actions, or with their continuations"
            )
        else:
            command.add_argument("--split", choices=SPLITS, default="train")
    model = commands.add_parser("model")
    model.add_argument("model", help="base, sft, rl@<domain>, merged, merged_linear, or a folder")
    model.add_argument("--to", required=True, help="the folder to write")
    other = commands.add_parser("import")
    other.add_argument("source", help="a .json, .jsonl or .eval file, or a folder of such files")
    other.add_argument("--to", required=True, help="the file to write: .jsonl for conversations, .parquet for episodes")
    gguf = commands.add_parser("gguf")
    gguf.add_argument("source", help="a .gguf file, or gemma-270m")
    gguf.add_argument("--to", required=True, help="the folder to write")
    terms = commands.add_parser("terms")
    terms.add_argument("names", nargs="*", help="packages; other names have no terms")
    return parser


def import_gguf(source: str, target: Path) -> None:
    """Raises FileExistsError or PolicyError."""
    from stages.exchange.gguf import PACKAGES, packaged, write_gguf

    with TemporaryDirectory(prefix="bellwether-") as scratch:
        write_gguf(packaged(source, Path(scratch)) if source in PACKAGES else Path(source), target)


def import_trajectories(source: Path, target: Path) -> str:
    """Write the trajectories of `source` as the suffix of `target` says; what was written, for people. Raises ValueError."""
    check_kind(target)
    items = list(read_items(source))
    if target.suffix == ".parquet":
        episodes = [item.episode() for item in items]
        if len({episode.episode_id for episode in episodes}) < len(episodes):
            raise ValueError(f"{source} has an episode twice")
        write_episodes(target, episodes)
        return f"{len(episodes)} episodes"
    records = [record for item in items for record in item.records()]
    write_records(target, records)
    return f"{len(records)} conversations"


@command
def main() -> int:
    from stages.runtime.workers import quiet_environment

    options, root = command_line().parse_args(), Path.cwd()
    try:
        if options.what == "terms":
            from stages.exchange.gguf import check_terms

            check_terms(options.names)
            return 0
        if options.what == "import":
            print(f"exchange: wrote {import_trajectories(Path(options.source), Path(options.to))} to {options.to}")
            return 0
        params = load_params(root / "params.yaml")
        quiet_environment(params.resources.threads, not params.model.path.startswith("hub:"))
        if options.what == "model":
            from stages.agent.model_names import resolve_model
            from stages.exchange.models import write_model

            write_model(resolve_model(options.model, root, params), Path(options.to))
            print(f"export: wrote {options.model} to {options.to}")
            return 0
        if options.what == "gguf":
            import_gguf(options.source, Path(options.to))
            print(f"exchange: wrote {options.source} to {options.to}")
            return 0
        if options.domain not in params.domains:
            raise ValueError(f"--domain {options.domain} is not among `domains` in params.yaml: {', '.join(params.domains)}")
        if getattr(options, "format", None) in DOCUMENTS:
            episodes = chosen_episodes(root, options)
            name = options.model or MERGED if options.source == PANEL else options.source
            write_documents(Path(options.to), options.format, episodes, name)
            print(f"export: wrote {len(episodes)} episodes to {options.to}")
            return 0
        check_kind(Path(options.to))
        rows = TABLES[options.what](root, params, options)
        write_records(Path(options.to), rows)
    except (ValueError, OSError) as error:
        print(f"{'exchange' if options.what in IMPORTS else 'export'}: {error}", file=sys.stderr)
        return 2
    print(f"export: wrote {len(rows)} rows to {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
