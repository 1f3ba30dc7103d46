"""Builds and cleans tasks from checked records, and replaces those that cleaning rejects."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.curation.cleaning import drop_duplicate_records, reject_faulty, task_faults
from stages.curation.raw import RawRecord, Rejection
from stages.curation.selection import order_by_mix
from stages.environments.protocol import Domain
from stages.records.task import SPLITS, Split, Task
from stages.runtime import spans
from stages.runtime.progress import Progress

ShowBuilding = Callable[[int], AbstractContextManager[Progress]]
"""Number of records -> progress bar."""


@dataclass
class Assembly:
    """`tasks` sorted by split (train, valid, test) and id; `unused`: number of valid records beyond the requested counts, or of
    a difficulty with weight 0 in the domain's settings."""

    tasks: list[Task] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    unused: int = 0


@spans.span("environment")
def _build(
    domain: Domain, records: Sequence[Mapping[str, Any]], folder: Path, workers: int, show: ShowBuilding | None
) -> list[Task]:
    """`Domain.build`, with a progress bar if the domain reports progress."""
    build: Callable[..., list[Task]] = domain.build
    if show is None or "built" not in inspect.signature(build).parameters:
        return build(records, folder, workers)
    with show(len(records)) as bar:
        return build(records, folder, workers, built=bar.advance)


def build_tasks(
    domain: Domain, records: Sequence[RawRecord], folder: Path, workers: int, show: ShowBuilding | None = None
) -> tuple[list[Task], list[Rejection]]:
    """Build `records` in a fresh `folder`. A record that the domain's error names is rejected, and the rest built again. Raises
    ValueError if the error names none of the records."""
    remaining = list(records)
    rejections: list[Rejection] = []
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            return _build(domain, [record.record for record in remaining], folder, workers, show), rejections
        except ValueError as error:
            named = [record for record in remaining if record.task_id in str(error)]
            if not named:
                raise
            # The longest id, since one id may be part of another.
            culprit = max(named, key=lambda record: len(record.task_id))
            rejections.append(Rejection.of(culprit, "not_buildable", str(error)))
            remaining.remove(culprit)


def assemble(
    domain: Domain,
    records: Sequence[RawRecord],
    requested: Mapping[Split, int],
    folder: Path,
    workers: int,
    max_length: int,
    show: ShowBuilding | None = None,
) -> Assembly:
    """At most `requested[split]` clean tasks of each split, with their files below `folder`. Rejected tasks are replaced by the
    next unused records. Raises ValueError as `build_tasks` does."""
    result = Assembly()
    unique, result.rejections = drop_duplicate_records(records)
    sources = {record.task_id: record for record in unique}
    queues = {split: order_by_mix([r for r in unique if r.split == split], domain)[::-1] for split in SPLITS}
    unwanted = len(unique) - sum(map(len, queues.values()))
    chosen = {split: [queues[split].pop() for _ in range(min(requested[split], len(queues[split])))] for split in SPLITS}
    while True:
        picked = [record for split in SPLITS for record in chosen[split]]
        tasks, rejections = build_tasks(domain, picked, folder, workers, show)
        kept, faulty = reject_faulty(tasks, task_faults(tasks, domain, max_length), sources)
        rejections += faulty
        result.rejections += rejections
        rejected = {rejection.task_id for rejection in rejections}
        if not rejected:
            break
        for split in SPLITS:
            chosen[split] = [record for record in chosen[split] if record.task_id not in rejected]
            while len(chosen[split]) < requested[split] and queues[split]:
                chosen[split].append(queues[split].pop())
    result.tasks = sorted(kept, key=lambda task: (SPLITS.index(task.split), task.task_id))
    result.unused = unwanted + sum(len(queue) for queue in queues.values())
    return result
