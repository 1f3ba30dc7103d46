"""workers: seconds of four stages of the default run, shortened and alone, with one worker and with resources.workers.

The scenario fails if the outputs differ. The table predicts the speed-up with up to 64 workers by Amdahl's law: a stage that
takes T(1) with one worker and T(n) with n has the serial share s = (n T(n) / T(1) - 1) / (n - 1), and T(m) = T(1) (s + (1 - s) /
m). It assumes a core with caches and memory bandwidth of its own for each worker, and enough episodes to divide.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import Options, Result, Sample, rounded
from benchmarks.startup import need_finished, run
from stages.runtime.lineage import output_hashes
from stages.runtime.workspace import EvaluationWorkspace, link_tree

DOMAIN = "textworld"
STAGES = {"rollout": DOMAIN, "annotate": DOMAIN, "rl": DOMAIN, "evaluate": None}
"""Stage -> its domain."""
EDITS = {
    "rollout": {"tasks": 96},
    "annotate": {"tasks": 48},
    "rl": {"steps": 10, "checkpoint_every": 100},
    "evaluate": {"models": ["sft", "merged"]},
}
"""With rollouts and trees, which the default run has none of. Otherwise its budgets, but a quarter of its training steps and two
of its models: fewer would measure the start of processes."""
PREDICTED = (1, 2, 4, 8, 16, 32, 64)
AGAINST = "one worker"


def make_checkout(options: Options, folder: Path, edits: Mapping[str, Mapping[str, Any]]) -> Path:
    """A copy of the checkout, with links to its files, and with `edits` in the sections of params.yaml."""
    for name in ("stages", "flows", "data"):
        link_tree(options.root / name, folder / name)
    for name in ("dvc.yaml", "dvc.lock"):
        shutil.copy2(options.root / name, folder / name)
    values = yaml.safe_load((options.root / "params.yaml").read_text(encoding="utf-8"))
    for section, changes in edits.items():
        values[section] = {**(values.get(section) or {}), **changes}
        if section in values["per_domain"][DOMAIN]:
            values["per_domain"][DOMAIN][section] = {}
    EvaluationWorkspace(folder).write_settings(values)
    return folder


def stage_command(stage: str, domain: str | None) -> list[str]:
    return [sys.executable, "-m", f"stages.{stage}", *(["--domain", domain] if domain else [])]


def samples_of(options: Options, counts: Sequence[int]) -> dict[int, dict[str, list[Sample]]]:
    """Workers -> stage -> its runs. Raises RuntimeError if the number of workers changes an output."""
    folders = {}
    for count in counts:
        edits = {**EDITS, "resources": {"workers": count}}
        folders[count] = make_checkout(options, options.scratch / f"workers-{count}", edits)
    found: dict[int, dict[str, list[Sample]]] = {count: {stage: [] for stage in STAGES} for count in counts}
    for repeat in range(options.times):
        for stage, domain in STAGES.items():
            hashes = {}
            for count in counts if repeat % 2 else reversed(counts):
                found[count][stage].append(run(stage_command(stage, domain), folders[count])[0])
                hashes[count] = output_hashes(folders[count], stage, domain)
            if any(other != hashes[counts[0]] for other in hashes.values()):
                raise RuntimeError(f"the outputs of {stage} differ between {' and '.join(map(str, counts))} workers")
    return found


def serial_share(one: float, many: float, workers: int) -> float:
    """Amdahl's serial share of a stage that takes `one` seconds with one worker and `many` with `workers`; within 0 and 1."""
    return min(1.0, max(0.0, (workers * many / one - 1) / (workers - 1)))


def predicted(seconds: Mapping[str, tuple[float, float]], workers: int) -> list[dict[str, float]]:
    """A row for each of PREDICTED: the speed-up of each stage and of all together. seconds: stage -> with one worker, with
    `workers`."""
    one = {stage: pair[0] for stage, pair in seconds.items()}
    serial = {stage: serial_share(*pair, workers) for stage, pair in seconds.items()}
    rows = []
    for count in PREDICTED:
        times = {stage: one[stage] * (serial[stage] + (1 - serial[stage]) / count) for stage in seconds}
        speed_ups = {stage: rounded(one[stage] / times[stage]) for stage in seconds}
        rows.append({"workers": float(count), **speed_ups, "together": rounded(sum(one.values()) / sum(times.values()))})
    return rows


def added(samples: Mapping[str, Sequence[Sample]]) -> list[Sample]:
    """The n-th runs of all stages as one."""
    return [Sample(1.0, sum(s.wall for s in turn), sum(s.cpu for s in turn)) for turn in zip(*samples.values(), strict=True)]


def measure(options: Options) -> tuple[dict[str, Result], list[dict[str, float]]]:
    need_finished(options.root)
    many = max(2, options.workers)
    found = samples_of(options, (1, many))
    found = {count: {**by_stage, "together": added(by_stage)} for count, by_stage in found.items()}
    notes = {"workers": many, "domain": DOMAIN, "budgets": EDITS}
    results = {
        f"workers_{stage}": Result("s", AGAINST, "seconds", found[many][stage], found[1][stage], notes=notes)
        for stage in found[many]
    }
    medians = {stage: tuple(statistics.median(s.wall for s in found[count][stage]) for count in (1, many)) for stage in STAGES}
    rows = predicted(medians, many)
    ratio = results["workers_together"].summary()["ratio"]
    for row in rows:
        if row["workers"] in (1, many):
            row |= {"measured": 1.0, "low": 1.0, "high": 1.0}
        if row["workers"] == many:
            row |= {"measured": ratio["median"], "low": ratio["low"], "high": ratio["high"]}
    return results, rows
