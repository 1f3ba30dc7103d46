"""Settings compared over seeds, as a Prefect flow:
`python -m flows.compare --setting grpo rl.algorithm=grpo --setting rloo rl.algorithm=rloo --seeds 0 1 2 3 4`.

One DVC experiment per setting and seed, as many at a time as the cores carry; an experiment that exists is not run
again. With `--looks 8 12 20`, settings are judged after so many seeds, and only those that are still undecided against the first
get further ones. Then one table and one figure, reports/comparisons/<name>.md and .svg: interquartile mean with stratified
bootstrap, the probability that each setting improves on the first, and the difference from it with its effect by the rules of the
claims board. With `--claim`, the exit code is the verdict on the first setting's rival: 0 yes, 1 no, 2 undecided.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import wait
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flows import arguments, forms
from flows.experiments import clean_up_on_error, experiment_name, output, results, run_experiment, tree_state
from flows.lifecycle import logger
from flows.overrides import OVERRIDE, check_files, check_overrides, normalised
from flows.pipeline import read_params
from flows.process import BAD_PARAMETERS, ROOT, ChildProcesses, StageFailedError, capture
from stages.runtime.command import RUN_FAILED, USAGE, AnswerParser, command
from stages.runtime.cores import concurrent_runs
from stages.runtime.files import atomic_text
from stages.runtime.yaml_files import value_at

FOLDER = Path("reports/comparisons")
Model = Literal["specialist", "base", "sft", "merged", "merged_linear"]
Metric = Literal["success", "reward", "accepted", "turns", "tokens", "cost"]
Claim = Literal["superiority", "non_inferiority", "equivalence"]
SHARES = ("success", "accepted")
"""Metrics for which the default margin, 5 points, has a meaning."""
ROWS = "data/evaluation/rows.parquet"
CODES = {"reproduced": 0, "not reproduced": 1, "undecided": 2}
"""Exit codes with `--claim`."""
Override = Annotated[str, Field(pattern=OVERRIDE)]
ONE_CORE = ["resources.threads=1", "resources.workers=1"]
"""Overrides of runs that share the machine with others. With `threads: 1`, as in the shipped params.yaml, neither changes a
result."""
ExperimentPlan = Mapping[tuple[str, int], tuple[str, list[str]]]
"""(setting, seed) -> name and overrides of its experiment."""


class Setting(BaseModel):
    """One of the settings compared."""

    model_config = ConfigDict(extra="forbid")

    overrides: list[Override] = Field(default_factory=list, description="Changes of params.yaml, such as rl.algorithm=rloo.")
    model: Model = Field("specialist", description="The model that is scored; specialist: rl@<domain> on its own domain.")


class Comparison(BaseModel):
    """Settings, seeds and metric of one comparison."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("comparison", pattern=r"^[a-z0-9_-]+$", description="Name of the files in reports/comparisons.")
    settings: dict[str, Setting] = Field(
        default_factory=lambda: {name: Setting(overrides=[f"rl.algorithm={name}"]) for name in ("grpo", "rloo")}, min_length=2
    )
    seeds: forms.Seeds = Field(default_factory=lambda: list(range(5)))
    vary: Literal["rl.seed", "seed"] = Field(
        "rl.seed", description="rl.seed: all runs share tasks and SFT policy; seed: each seed runs the whole pipeline."
    )
    metric: Metric = Field("success", description="A mean of reports/evaluation.json; larger is better.")
    looks: list[Annotated[int, Field(ge=2)]] | None = Field(
        None, max_length=4, description="Numbers of seeds after which settings are judged; empty: once, after all seeds."
    )
    claim: Claim | None = Field(None, description="What the second setting is claimed to be against the first.")
    margin: float = Field(0.05, gt=0, description="Differences within +-margin are equivalent, in the metric's unit.")
    threshold: float = Field(0.0, ge=0, description="superiority: the smallest difference worth the claim.")
    jobs: int | None = Field(
        None, ge=1, le=arguments.MOST_RUNS, description="Experiments at a time; empty: one per core, one on an accelerator."
    )

    @model_validator(mode="after")
    def _rules(self) -> Comparison:
        """What the verdicts need, before the first run."""
        looks, seeds = self.looks, len(self.seeds)
        if looks and (looks != sorted(set(looks)) or looks[-1] != seeds):
            raise ValueError(f"looks are growing numbers of seeds, the last of all {seeds}, not {looks}")
        if self.metric not in SHARES and "margin" not in self.model_fields_set:
            raise ValueError(f"margin: what difference in {self.metric} is too small to matter?")
        return self


def default_jobs(params: Mapping[str, Any]) -> int:
    """One experiment per core, one on an accelerator."""
    return concurrent_runs(str((params.get("resources") or {}).get("device", "cpu")))


def expanded(override: str, params: Mapping[str, Any]) -> list[str]:
    """`override`, and the same for each domain whose per_domain section sets the key."""
    key, _, value = normalised(override).partition("=")
    found = [f"{key}={value}"]
    for domain in params["domains"]:
        own = f"per_domain.{domain}.{key}"
        if value_at(params, own, ...) is not ...:
            found.append(f"{own}={value}")
    return found


def fixed_rl_seeds(params: Mapping[str, Any]) -> list[str]:
    """Overrides that reset every rl.seed of params.yaml, which would stay the same when `seed` varies."""
    keys = ["rl.seed", *(f"per_domain.{domain}.rl.seed" for domain in params["domains"])]
    return [f"{key}=null" for key in keys if value_at(params, key) is not None]


def overrides_of(comparison: Comparison, setting: Setting, seed: int, params: Mapping[str, Any], exclusive: bool) -> list[str]:
    """All changes of params.yaml for one run. Concurrent runs take one thread each."""
    models = {"specialist": [f"rl@{domain}" for domain in params["domains"]]}.get(setting.model, [setting.model])
    chosen = "[" + ",".join(f"'{model}'" for model in models) + "]"
    own = [change for override in setting.overrides for change in expanded(override, params)]
    if comparison.vary == "seed":
        own = [*fixed_rl_seeds(params), *own]
    varied = expanded(f"{comparison.vary}={seed}", params)
    return [*own, *varied, f"evaluate.models={chosen}", *([] if exclusive else ONE_CORE)]


def scores_of(evaluation: Mapping[str, Any], setting: Setting, metric: str, domains: list[str]) -> list[float]:
    """The run's score per domain. Raises StageFailedError for a model or metric that was not evaluated."""
    try:
        models = evaluation["models"]
        names = [f"rl@{domain}" if setting.model == "specialist" else setting.model for domain in domains]
        return [float(models[name][domain][metric]["mean"]) for name, domain in zip(names, domains, strict=True)]
    except (KeyError, TypeError) as error:
        raise StageFailedError(
            f"an experiment's evaluation has no {metric} of model {setting.model} (missing: {error})"
        ) from error


@task(retries=0, cache_policy=NO_CACHE)
def experiment(root: str, name: str, overrides: list[str], children: ChildProcesses) -> bool:
    """One run; whether it was necessary."""
    return run_experiment(Path(root), name, overrides, logger(), children)


def run_experiments(root: Path, runs: Mapping[str, tuple[str, list[str]]], jobs: int | None, alone: int = 0) -> None:
    """Run experiments (title -> name and overrides), `jobs` at a time (None: `default_jobs`), the first `alone` one by one. To be
    called in a flow. Raises StageFailedError for the first that fails, once those beside it have ended."""
    tasks = [(experiment.with_options(task_run_name=title), *run) for title, run in runs.items()]
    jobs = jobs or default_jobs(read_params(root))
    # Batches, as runs take equally long.
    batches = [*([one] for one in tasks[:alone]), *(tasks[first : first + jobs] for first in range(alone, len(tasks), jobs))]
    children = ChildProcesses()
    with clean_up_on_error(root, children):
        for batch in batches:
            futures = [run.submit(str(root), name, overrides, children) for run, name, overrides in batch]
            wait(futures)
            for future in futures:
                future.result()


def check(comparison: Comparison, root: Path) -> None:
    """Check all settings before the first run starts. Raises StageFailedError, naming the setting."""
    check_files(root)
    params = read_params(root)
    for label, setting in comparison.settings.items():
        try:
            check_overrides(root, overrides_of(comparison, setting, comparison.seeds[0], params, exclusive=False))
        except StageFailedError as error:
            raise StageFailedError(f"setting {label}: {error}", BAD_PARAMETERS) from error


def plan_experiments(comparison: Comparison, root: Path, labels: Collection[str], seeds: Sequence[int]) -> ExperimentPlan:
    """The experiments of some settings with some seeds, seed by seed."""
    params = read_params(root)
    state, exclusive = tree_state(root), (comparison.jobs or default_jobs(params)) == 1
    plan = {}
    for seed in seeds:
        for label in labels:
            overrides = overrides_of(comparison, comparison.settings[label], seed, params, exclusive)
            plan[label, seed] = experiment_name(f"{comparison.name}-{label}-{seed}", overrides, state), overrides
    return plan


def gather_scores(comparison: Comparison, root: Path, plan: ExperimentPlan) -> dict[str, list[list[float]]]:
    """Setting -> scores [runs, domains] of the experiments of `plan`, by seed."""
    domains = read_params(root)["domains"]
    scores: dict[str, list[list[float]]] = {label: [] for label in comparison.settings}
    for (label, _), (name, _) in plan.items():
        scores[label].append(scores_of(results(root, name), comparison.settings[label], comparison.metric, domains))
    return scores


def write(comparison: Comparison, root: Path, scores: Mapping[str, list[list[float]]], plan: ExperimentPlan) -> Path:
    """Write the scores, and the verdicts, table and figure that stages.reporting.comparison makes of them and, if DVC's cache has
    them, of the runs' rows per task; the file's path."""
    path = root / FOLDER / f"{comparison.name}.json"
    domains = read_params(root)["domains"]
    written = {**comparison.model_dump(exclude={"jobs"}), "domains": domains, "scores": scores}
    atomic_text(path, json.dumps(written, indent=1, sort_keys=False) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for number, ((label, seed), (name, _)) in enumerate(plan.items()):
            file = Path(folder) / f"{number}.parquet"
            with suppress(StageFailedError):
                file.write_bytes(output(root, name, ROWS))
                rows.append(f"{label}/{seed}={file}")
        command = [sys.executable, "-m", "stages.reporting.comparison", str(path), *(rows if len(rows) == len(plan) else [])]
        done = capture(command, ROOT)
    if done.returncode:
        raise StageFailedError(f"stages.reporting.comparison failed: {done.stderr.strip()}")
    return path


def verdicts(path: Path) -> dict[str, str]:
    """Setting -> its verdict against the first setting."""
    return {name: one["verdict"] for name, one in json.loads(path.read_text(encoding="utf-8"))["verdicts"].items()}


@flow(name="compare", task_runner=ThreadPoolTaskRunner(max_workers=256))
def compare(comparison: Comparison = Comparison(), root: str = "") -> str:  # noqa: B008
    """Compare settings over seeds; returns the path of the table.

    Args:
        comparison: What to compare.
        root: The checkout; empty: that of this flow.
    """
    folder = Path(root or ROOT)
    check(comparison, folder)
    log = logger()
    plan: dict[tuple[str, int], tuple[str, list[str]]] = {}
    pending = list(comparison.settings)
    for look in comparison.looks or [len(comparison.seeds)]:
        new = plan_experiments(comparison, folder, pending, comparison.seeds[:look])
        runs = {f"{label} {seed}": run for (label, seed), run in new.items() if (label, seed) not in plan}
        # The very first run alone, so that the others find the stages that all share in the cache.
        run_experiments(folder, runs, comparison.jobs, alone=0 if plan else 1)
        plan |= new
        path = write(comparison, folder, gather_scores(comparison, folder, plan), plan)
        found = verdicts(path)
        log(f"after {look} seeds: " + ", ".join(f"{name}: {verdict}" for name, verdict in found.items()))
        pending = [label for label in comparison.settings if found.get(label, "undecided") == "undecided"]
        if len(pending) == 1:  # the first setting alone
            break
    table = path.with_suffix(".md")
    log(table.read_text(encoding="utf-8"))
    return str(table)


def comparison_of(options: Namespace, parser: AnswerParser) -> Comparison:
    """The comparison that the command line asks for; exits with USAGE for one that is none."""
    settings = {}
    for label, *overrides in options.setting:
        name, _, model = label.partition(":")
        bad = [override for override in overrides if not re.fullmatch(OVERRIDE, override)]
        if bad or not name or "/" in name or name in settings:
            parser.error(f"--setting takes a unique name and KEY=VALUE pairs, not {[label, *overrides]}")
        if model and model not in get_args(Model):
            parser.error(f"--setting {label}: the model must be one of {', '.join(get_args(Model))}")
        settings[name] = Setting(overrides=overrides, **({"model": model} if model else {}))
    seeds = options.seeds or list(range(options.looks[-1] if options.looks else 5))
    if len(settings) < 2 or len(seeds) < 2:
        parser.error("a comparison needs at least two settings and two seeds")
    if options.claim and len(settings) != 2:
        parser.error("--claim is about two settings: the second against the first")
    given = {name: getattr(options, name) for name in ("name", "vary", "metric", "looks", "claim", "threshold", "jobs")}
    if options.margin is not None:
        given["margin"] = options.margin
    try:
        return Comparison(settings=settings, seeds=seeds, **given)
    except ValidationError as error:
        return parser.error(forms.mistakes(error))


@command
def main() -> int:
    parser = AnswerParser(prog="python -m flows.compare", description="Compare settings over seeds.")
    parser.add_argument(
        *("--setting", "-s"),
        nargs="+",
        action="append",
        required=True,
        metavar="NAME KEY=VALUE",
        help="a name and its overrides of params.yaml; at least twice. NAME:sft scores that model instead of the specialists",
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="the seeds (default: 0 1 2 3 4, or as many as the last look takes)")
    parser.add_argument("--looks", type=int, nargs="+", help="numbers of seeds after which settings are judged (default: all)")
    parser.add_argument("--claim", choices=get_args(Claim), help="exit with 0, 1 or 2: yes, no, undecided")
    parser.add_argument("--margin", type=float, help="differences within this are equivalent (default: 0.05 for shares)")
    parser.add_argument("--threshold", type=float, default=0.0, help="superiority: the smallest difference worth the claim")
    parser.add_argument("--vary", choices=["rl.seed", "seed"], default="rl.seed", help="the key that the seeds set")
    parser.add_argument("--metric", choices=get_args(Metric), default="success", help="a mean of reports/evaluation.json")
    parser.add_argument("--name", default="comparison", help="name of the files in reports/comparisons")
    parser.add_argument("--jobs", type=arguments.runs_at_once, help="experiments at a time (default: one per core)")
    options = parser.parse_args()
    given = comparison_of(options, parser)
    try:
        check(given, ROOT)  # before Prefect's server takes seconds to start
        table = compare(given)
    except StageFailedError as error:
        print(f"compare: {error}", file=sys.stderr)
        return USAGE if error.bad_parameters else RUN_FAILED
    except Exception:  # Python's own exit code for it, 1, would answer the claim with no
        traceback.print_exc()
        return RUN_FAILED
    if not given.claim:
        return 0
    (verdict,) = verdicts(Path(table).with_suffix(".json")).values()
    return CODES[verdict]


if __name__ == "__main__":
    sys.exit(main())
