"""The lifecycle with several seeds, evaluated on fresh panels, as a Prefect flow: `python -m flows.spread --seeds 0 1 2 3 4`.

One DVC experiment per seed, as many at a time as the cores carry. An experiment that exists is not run again, and what an
interrupted one has finished comes from DVC's cache. The panels are drawn with a seed of their own (curate.seeds.test), so all
play the same. Then reports/spread.parquet (outcomes per task) and reports/spread.json. `--check` only prints the cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BaseModel, ConfigDict, Field

from flows import arguments, forms
from flows.compare import ONE_CORE, default_jobs, expanded, fixed_rl_seeds, run_experiments
from flows.experiments import experiment_name, find, output, tree_state
from flows.lifecycle import logger
from flows.overrides import check_files, check_overrides
from flows.pipeline import read_params
from flows.process import BAD_PARAMETERS, ROOT, StageFailedError, capture
from stages.runtime.command import command, whole_number
from stages.runtime.files import atomic_file

ROWS = "data/evaluation/rows.parquet"
KEPT = Path("reports") / "runs.jsonl"
"""Kept runs with their measured CPU time (stages/reporting/keep.py)."""
Plan = Mapping[int, tuple[str, list[str]]]
"""Seed -> name and overrides of its experiment."""


class Spread(BaseModel):
    """Seeds of the lifecycle, and the panels that all of them play."""

    model_config = ConfigDict(extra="forbid")

    seeds: forms.Seeds = Field(default_factory=lambda: list(range(5)))
    panel_seed: forms.Seed = Field(1, description="Seed of the panels' recipes.")
    tasks: int = Field(400, ge=2, description="Tasks per panel.")
    jobs: int | None = Field(
        None, ge=1, le=arguments.MOST_RUNS, description="Lifecycles at a time; empty: one per core, one on an accelerator."
    )


def plan_runs(spread: Spread, root: Path) -> Plan:
    """The experiments, by seed. Raises StageFailedError for invalid parameters and files that git does not track."""
    check_files(root)
    params, state = read_params(root), tree_state(root)
    exclusive = (spread.jobs or default_jobs(params)) == 1
    panels = [f"curate.test={spread.tasks}", f"curate.seeds.test={spread.panel_seed}"]
    shared = [change for override in panels for change in expanded(override, params)] + ([] if exclusive else ONE_CORE)
    plan = {}
    for seed in spread.seeds:
        overrides = [f"seed={seed}", *fixed_rl_seeds(params), *shared]
        plan[seed] = experiment_name(f"spread-{seed}", overrides, state), overrides
    check_overrides(root, plan[spread.seeds[0]][1])
    return plan


def cpu_minutes(root: Path, tasks: int) -> float | None:
    """CPU minutes of one lifecycle by the newest kept run with measurements, evaluation in proportion to the panels; None without
    such a run."""
    lines = (root / KEPT).read_text(encoding="utf-8").splitlines() if (root / KEPT).exists() else []
    runs = [run for run in map(json.loads, filter(str.strip, lines)) if run.get("measured")]
    if not runs:
        return None
    scale = {"evaluate": tasks / runs[-1]["params"]["curate"]["test"]}
    return sum(one["cpu_seconds"] * scale.get(stage, 1.0) for stage, one in runs[-1]["measured"].items()) / 60


def cost(spread: Spread, root: Path, plan: Plan) -> str:
    """What is left to run, and what it costs."""
    missing = [seed for seed, (name, _) in plan.items() if find(root, name) is None]
    minutes = cpu_minutes(root, spread.tasks)
    text = f"{len(missing)} of {len(plan)} lifecycles to run, {spread.jobs or default_jobs(read_params(root))} at a time"
    if minutes is None:
        return f"{text}; their cost is unknown, since {KEPT} has no measured run ('make keep' adds one)"
    return f"{text}; about {minutes:.0f} CPU minutes each, {minutes * len(missing):.0f} in all (measured in {KEPT})"


def collect(root: Path, plan: Plan) -> str:
    """Write the reports from the rows of all experiments; the table. Raises StageFailedError."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for seed, (name, _) in plan.items():
            path = Path(folder) / f"{seed}.parquet"
            with atomic_file(path, durable=False) as partial:
                partial.write_bytes(output(root, name, ROWS))
            files.append(f"{seed}={path}")
        done = capture([sys.executable, "-m", "stages.reporting.spread", *files], root)
    if done.returncode:
        raise StageFailedError(f"stages.reporting.spread failed: {done.stderr.strip()}")
    return done.stdout


@flow(name="spread", task_runner=ThreadPoolTaskRunner(max_workers=256))
def spread(settings: Spread = Spread(), root: str = "") -> str:  # noqa: B008
    """Run the lifecycle with several seeds on fresh panels; returns the table of results.

    Args:
        settings: Seeds and panels.
        root: The checkout; empty: that of this flow.
    """
    folder, log = Path(root or ROOT), logger()
    plan = plan_runs(settings, folder)
    log(f"spread: {cost(settings, folder, plan)}")
    run_experiments(folder, {f"seed {seed}": run for seed, run in plan.items()}, settings.jobs)
    table = collect(folder, plan)
    log(table)
    return table


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.spread", description="Run the lifecycle with several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)), help="values of seed")
    parser.add_argument("--panel-seed", type=int, default=1, help="seed of the fresh panels")
    parser.add_argument("--tasks", type=whole_number(2), default=400, help="tasks per panel")
    parser.add_argument("--jobs", type=arguments.runs_at_once, help="lifecycles at a time")
    parser.add_argument("--check", action="store_true", help="check the settings and print the cost; run nothing")
    options = parser.parse_args()
    try:
        given = Spread(seeds=options.seeds, panel_seed=options.panel_seed, tasks=options.tasks, jobs=options.jobs)
        plan = plan_runs(given, ROOT)  # before Prefect's server takes seconds to start
        if options.check:
            print(f"spread: {cost(given, ROOT, plan)}")
            return 0
        spread(given)
    except (StageFailedError, ValueError) as error:
        print(f"spread: {forms.mistakes(error)}", file=sys.stderr)
        return BAD_PARAMETERS if getattr(error, "bad_parameters", True) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
