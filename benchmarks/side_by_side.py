"""workers_lifecycle: seconds of the default run with rollouts and trees, with one worker and with resources.workers.

Stages from rollout to evaluate run as `make lifecycle` runs them: as soon as what they need is there, and with several workers
side by side. The scenario fails if the outputs differ.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.measure import Options, Result, Sample
from benchmarks.startup import need_finished, run
from benchmarks.workers import AGAINST, make_checkout, stage_command
from flows.pipeline import concurrent_stages, item_graph
from flows.schedule import run_graph
from stages.runtime.lineage import output_hashes

STAGES = ("rollout", "annotate", "rl", "merge", "evaluate")
EDITS = {"rollout": {"tasks": 96}, "annotate": {"tasks": 48}}
"""Rollouts and trees, which the default run has none of."""


def graph(root: Path) -> dict[str, list[str]]:
    """Item of STAGES (`rl@search`) -> the items of STAGES that it needs, in an order in which they can run."""
    needs = {item: others for item, others in item_graph(root).items() if item.partition("@")[0] in STAGES}
    return {item: [other for other in others if other in needs] for item, others in needs.items()}


def play(needs: Mapping[str, Sequence[str]], folder: Path, jobs: int) -> Sample:
    """Run all items in `folder`, at most `jobs` at a time."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def start(item: str) -> Sample:
        stage, _, domain = item.partition("@")
        return run(stage_command(stage, domain), folder)[0]

    before, started = cpu(), time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        run_graph(needs, lambda item: pool.submit(start, item), jobs)
    return Sample(1.0, time.perf_counter() - started, cpu() - before)


def hashes(needs: Mapping[str, Sequence[str]], folder: Path) -> dict[str, dict[str, str]]:
    """Item -> the hashes of its outputs."""
    return {item: output_hashes(folder, item.partition("@")[0], item.partition("@")[2] or None) for item in needs}


def measure(options: Options) -> dict[str, Result]:
    """Raises RuntimeError if the number of workers changes an output."""
    need_finished(options.root)
    needs, many = graph(options.root), max(2, options.workers)
    jobs = {1: 1, many: concurrent_stages(options.root)}
    found: dict[int, list[Sample]] = {count: [] for count in jobs}
    outputs = []
    for repeat in range(options.times):
        for count in jobs if repeat % 2 else reversed(jobs):
            edits = {**EDITS, "resources": {"workers": count}}
            folder = make_checkout(options, options.scratch / f"lifecycle-{repeat}-{count}", edits)
            found[count].append(play(needs, folder, jobs[count]))
            outputs.append(hashes(needs, folder))
    if any(other != outputs[0] for other in outputs):
        raise RuntimeError(f"the outputs from rollout to evaluate differ between {' and '.join(map(str, jobs))} workers")
    notes = {"workers": many, "stages": list(needs), "side by side": jobs[many]}
    return {"workers_lifecycle": Result("s", AGAINST, "seconds", found[many], found[1], notes=notes)}
