"""Validation tasks that designs are scored on, disjoint from the frozen panels and from training tasks.

The tasks of the search (`search`) and those of the confirmation (`confirm`) share no world.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from stages.curation.assemble import assemble
from stages.curation.cleaning import task_faults
from stages.curation.panel import Panel, read_panel
from stages.curation.raw import check_lines, record_line
from stages.designs.settings import SearchParams
from stages.environments.protocol import Domain
from stages.environments.registry import load_domain
from stages.records.episode import read_tasks
from stages.records.task import Task
from stages.runtime.validation import ParamsError
from stages.seeding import permutation

FEWEST = 2
"""Smallest number of worlds for a score."""
SPARE = 32
"""Tasks built beyond those needed, since each world goes entirely to search or confirmation."""
RECIPES_PER_TASK, RECIPES_MORE = 20, 200
"""Recipes drawn for a validation task: 3 in 52 are for validation."""


@dataclass(frozen=True)
class DomainTasks:
    """The tasks of one domain; `worlds` is the folder of their worlds."""

    panel: Panel
    search: tuple[Task, ...]
    confirm: tuple[Task, ...]
    worlds: Path


def _worlds(tasks: Sequence[Task]) -> int:
    return len({task.unit for task in tasks})


def _spread(worlds: Sequence[Sequence[Task]], most: int) -> list[Task]:
    """At most `most` tasks, one per world before a second one of any; sorted by id."""
    turns = zip_longest(*worlds)
    tasks = [task for turn in turns for task in turn if task is not None]
    return sorted(tasks[:most], key=lambda task: task.task_id)


def split_tasks(tasks: Sequence[Task], search: int, confirm: int, seed: int) -> tuple[list[Task], list[Task]]:
    """At most `search` and `confirm` tasks that share no world, of FEWEST worlds or more each if there are enough. With too few
    tasks both parts shrink about in proportion."""
    worlds: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda task: task.task_id):
        worlds.setdefault(task.unit, []).append(task)
    wanted = min(confirm, round(len(tasks) * confirm / (search + confirm)))
    first = [worlds[world] for world in permutation(worlds, seed, "design.tasks")]
    second: list[list[Task]] = []
    while len(first) > FEWEST and (len(second) < FEWEST or sum(map(len, second)) < wanted):
        second.append(first.pop())
    return _spread(first, search), _spread(second, confirm)


def _more(domain: Domain, curated: Sequence[Task], needed: int, folder: Path, params: SearchParams) -> list[Task]:
    """Validation tasks from the domain's recipes, their worlds below `folder`, none of which shares a world with the curated
    tasks or an entity with a test task."""
    lines = (
        record_line(record).encode()
        for record in domain.recipes(RECIPES_PER_TASK * needed + RECIPES_MORE, params.seed)
        if record.get("split") == "valid"
    )
    records, _ = check_lines(lines, f"recipes of domain {domain.name}", domain)
    counts = {"train": 0, "valid": needed, "test": 0}
    tasks = assemble(domain, records, counts, folder, params.resources.workers, params.model.max_length).tasks
    others = [task for task in curated if task.split != "valid"]
    faults = task_faults([*(task for task in others if task.split == "test"), *tasks], domain, params.model.max_length)
    taken = {task.cluster for task in others if task.cluster}
    return [task for task in tasks if task.task_id not in faults and task.cluster not in taken]


def choose_tasks(root: Path, name: str, params: SearchParams, folder: Path) -> DomainTasks:
    """Tasks of domain `name`: its curated validation tasks or, if `design` needs more, new ones from its recipes. Raises
    ParamsError if there are too few, FileNotFoundError or PanelMismatchError without a panel."""
    curated, design = root / "data" / "curated" / name, params.design
    if not (curated / "panel.json").exists():
        raise FileNotFoundError(f"{curated / 'panel.json'} does not exist; run 'dvc repro curate@{name}' first")
    panel = read_panel(curated)
    known = read_tasks(curated / "tasks.parquet")
    tasks, worlds = [task for task in known if task.split == "valid"], curated / "worlds"
    needed = design.tasks + design.confirm.tasks
    if len(tasks) < needed or _worlds(tasks) < 2 * FEWEST:
        more = _more(load_domain(name, panel.environment), known, needed + SPARE, folder, params)
        if len(more) > len(tasks):
            tasks, worlds = more, folder
    if len(tasks) < needed:
        print(
            f"design: {name} has only {len(tasks)} of the {needed} validation tasks requested; all of them are used",
            file=sys.stderr,
        )
    search, confirm = split_tasks(tasks, design.tasks, design.confirm.tasks, params.seed)
    if min(_worlds(search), _worlds(confirm)) < FEWEST:
        raise ParamsError(
            f"domain {name} has {len(tasks)} validation tasks in {_worlds(tasks)} worlds, too few for search and "
            f"confirmation; raise curate.valid and run 'dvc repro curate@{name}'"
        )
    return DomainTasks(panel, tuple(search), tuple(confirm), worlds)
