"""Settings compared over seeds, as a Prefect flow:
`python -m flows.compare --setting grpo rl.algorithm=grpo --setting rloo rl.algorithm=rloo --seeds 0 1 2 3 4`.

One DVC experiment per setting and seed, as many at a time as the cores carry; an experiment that is there already is not run
again. Then one table and one figure, reports/comparisons/<name>.md and .svg: interquartile mean with stratified bootstrap, and
the probability that each setting improves on the first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import wait
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BaseModel, ConfigDict, Field

from flows.experiments import experiment_name, left_tidy, results, run_experiment, tree_state
from flows.lifecycle import echo
from flows.overrides import OVERRIDE, check_files, check_overrides, normalised
from flows.pipeline import BAD_PARAMETERS, ROOT, Children, StageFailedError, read_params
from stages.runtime.command import command
from stages.runtime.files import atomic_text

FOLDER = Path("reports/comparisons")
Seed = Annotated[int, Field(ge=0)]
Model = Literal["specialist", "base", "sft", "merged", "merged_linear"]
Metric = Literal["success", "reward", "accepted", "turns", "tokens", "cost"]
Override = Annotated[str, Field(pattern=OVERRIDE)]
Plan = Mapping[tuple[str, int], tuple[str, list[str]]]
"""(setting, seed) -> name and overrides of its experiment."""


class Setting(BaseModel):
    """One of the things compared."""

    model_config = ConfigDict(extra="forbid")

    overrides: list[Override] = Field(default_factory=list, description="Changes of params.yaml, such as rl.algorithm=rloo.")
    model: Model = Field("specialist", description="Whose scores count; specialist: rl@<domain> on its own domain.")


class Comparison(BaseModel):
    """What is compared, and how it is run."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("comparison", pattern=r"^[a-z0-9_-]+$", description="Of the files below reports/comparisons.")
    settings: dict[str, Setting] = Field(
        default_factory=lambda: {name: Setting(overrides=[f"rl.algorithm={name}"]) for name in ("grpo", "rloo")}, min_length=2
    )
    seeds: list[Seed] = Field(default_factory=lambda: list(range(5)), min_length=2)
    vary: Literal["rl.seed", "seed"] = Field(
        "rl.seed", description="rl.seed: all runs share tasks and SFT policy; seed: everything is made anew for each seed."
    )
    metric: Metric = Field("success", description="A mean of reports/evaluation.json.")
    jobs: int | None = Field(None, ge=1, le=256, description="Experiments at a time; empty: one per core, one on an accelerator.")


def checked_jobs(asked: int | None, params: Mapping[str, Any]) -> int:
    """Experiments at a time."""
    on_cpu = str((params.get("resources") or {}).get("device", "cpu")) == "cpu"
    return asked or ((os.cpu_count() or 1) if on_cpu else 1)


def in_force(override: str, params: Mapping[str, Any]) -> list[str]:
    """`override`, and the same for every domain that overrides the key in per_domain."""
    key, _, value = normalised(override).partition("=")
    found = [f"{key}={value}"]
    for domain in params["domains"]:
        node: Any = (params.get("per_domain") or {}).get(domain)
        for part in key.split("."):
            node = node.get(part, ...) if isinstance(node, dict) else ...
        if node is not ...:
            found.append(f"per_domain.{domain}.{key}={value}")
    return found


def overrides_of(comparison: Comparison, setting: Setting, seed: int, params: Mapping[str, Any], alone: bool) -> list[str]:
    """All changes of params.yaml for one run. Runs beside others take one thread each."""
    models = {"specialist": [f"rl@{domain}" for domain in params["domains"]]}.get(setting.model, [setting.model])
    chosen = "[" + ",".join(f"'{model}'" for model in models) + "]"
    shared = [] if alone else ["resources.threads=1", "resources.workers=1"]
    own = [change for override in setting.overrides for change in in_force(override, params)]
    return [*own, f"{comparison.vary}={seed}", f"evaluate.models={chosen}", *shared]


def scores_of(evaluation: Mapping[str, Any], setting: Setting, metric: str, domains: list[str]) -> list[float]:
    """The run's score per domain. Raises StageFailedError for a model or metric that was not evaluated."""
    try:
        models = evaluation["models"]
        names = [f"rl@{domain}" if setting.model == "specialist" else setting.model for domain in domains]
        return [float(models[name][domain][metric]["mean"]) for name, domain in zip(names, domains, strict=True)]
    except (KeyError, TypeError) as error:
        raise StageFailedError(
            f"an experiment's evaluation has no {metric} of model {setting.model} ({error} is missing)"
        ) from error


@task(retries=0, cache_policy=NO_CACHE)
def experiment(root: str, name: str, overrides: list[str], children: Children) -> bool:
    """One run; whether it had to be run."""
    return run_experiment(Path(root), name, overrides, echo(), children)


def check(comparison: Comparison, root: Path) -> None:
    """Raise StageFailedError for what would stop a run that is still to come, naming its setting, before the first one starts."""
    check_files(root)
    params = read_params(root)
    for label, setting in comparison.settings.items():
        try:
            check_overrides(root, overrides_of(comparison, setting, comparison.seeds[0], params, alone=False))
        except StageFailedError as error:
            raise StageFailedError(f"setting {label}: {error}", BAD_PARAMETERS) from error


def planned(comparison: Comparison, root: Path) -> Plan:
    """The experiments of a comparison, seed by seed."""
    params = read_params(root)
    state, alone = tree_state(root), checked_jobs(comparison.jobs, params) == 1
    plan = {}
    for seed in comparison.seeds:
        for label, setting in comparison.settings.items():
            overrides = overrides_of(comparison, setting, seed, params, alone)
            plan[label, seed] = experiment_name(f"{comparison.name}-{label}-{seed}", overrides, state), overrides
    return plan


def gathered(comparison: Comparison, root: Path, plan: Plan) -> dict[str, list[list[float]]]:
    """Setting -> scores [runs, domains] of the experiments of `plan`."""
    domains = read_params(root)["domains"]
    return {
        label: [scores_of(results(root, plan[label, seed][0]), setting, comparison.metric, domains) for seed in comparison.seeds]
        for label, setting in comparison.settings.items()
    }


def write(comparison: Comparison, root: Path, scores: Mapping[str, list[list[float]]]) -> Path:
    """The scores as a file, and the table and figure that the stages' command line makes of it; the table's path."""
    path = root / FOLDER / f"{comparison.name}.json"
    domains = read_params(root)["domains"]
    written = {**comparison.model_dump(exclude={"jobs"}), "domains": domains, "scores": scores}
    atomic_text(path, json.dumps(written, indent=1, sort_keys=False) + "\n")
    command = [sys.executable, "-m", "stages.reporting.comparison", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise StageFailedError(f"stages.reporting.comparison failed: {done.stderr.strip()}")
    return path.with_suffix(".md")


@flow(name="compare", task_runner=ThreadPoolTaskRunner(max_workers=256))
def compare(comparison: Comparison = Comparison(), root: str = "") -> str:  # noqa: B008
    """Compare settings over seeds; returns the path of the table.

    Args:
        comparison: What to compare.
        root: The checkout; empty: the one that this flow belongs to.
    """
    place = Path(root or ROOT)
    check(comparison, place)
    plan = planned(comparison, place)
    jobs = checked_jobs(comparison.jobs, read_params(place))
    runs = [(experiment.with_options(task_run_name=f"{label} {seed}"), *run) for (label, seed), run in plan.items()]
    children = Children()
    with left_tidy(place, children):
        # The first goes ahead, so that what all runs share is in the cache for the others; these are about equally long.
        for rank in [runs[:1], *(runs[first : first + jobs] for first in range(1, len(runs), jobs))]:
            waiting = [task_of.submit(str(place), name, overrides, children) for task_of, name, overrides in rank]
            wait(waiting)
            for future in waiting:
                future.result()
    table = write(comparison, place, gathered(comparison, place, plan))
    echo()(table.read_text(encoding="utf-8"))
    return str(table)


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.compare", description="Compare settings over seeds.")
    parser.add_argument(
        *("--setting", "-s"),
        nargs="+",
        action="append",
        required=True,
        metavar="NAME KEY=VALUE",
        help="a name and its changes of params.yaml; at least two times. NAME:sft scores that model in place of the specialists",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--vary", choices=["rl.seed", "seed"], default="rl.seed", help="what the seeds are of")
    parser.add_argument("--metric", choices=get_args(Metric), default="success", help="a mean of reports/evaluation.json")
    parser.add_argument("--name", default="comparison", help="of the files below reports/comparisons")
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args()
    settings = {}
    for label, *overrides in options.setting:
        name, _, model = label.partition(":")
        bad = [override for override in overrides if not re.fullmatch(OVERRIDE, override)]
        if bad or not name or name in settings:
            parser.error(f"--setting takes a name of its own and KEY=VALUE pairs, not {[label, *overrides]}")
        if model and model not in get_args(Model):
            parser.error(f"--setting {label}: the model is one of {', '.join(get_args(Model))}")
        settings[name] = Setting(overrides=overrides, **({"model": model} if model else {}))
    if len(settings) < 2 or len(options.seeds) < 2:
        parser.error("a comparison needs at least two settings and two seeds")
    given = Comparison(
        name=options.name, settings=settings, seeds=options.seeds, vary=options.vary, metric=options.metric, jobs=options.jobs
    )
    try:
        check(given, ROOT)  # before Prefect's server starts, which takes seconds
        compare(given)
    except StageFailedError as error:
        print(f"compare: {error}", file=sys.stderr)
        return BAD_PARAMETERS if error.bad_parameters else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
