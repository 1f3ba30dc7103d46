"""Runs the arms of experiments, each in a workspace made from the committed checkout, and reads their metrics.

All runs that agree in everything before rl start from one workspace, which `dvc repro` brings up to date with the checkout's DVC
cache: the SFT policy is trained once for all arms and seeds, and evaluated once. Runs of one name, which differ after training
alone, are trained once. An interrupted run resumes from its checkpoint, also at a later commit if no code that bears on it has
changed. A run's workspace is removed once its outcome is stored (`release`).

Not DVC experiments, as in flows/experiments.py: these repeat the shared stages' checks in every run, start anew after a kill, and
leave a git reference per run, of which the board has hundreds. stages/designs/evaluations.py runs no stage but evaluate."""

from __future__ import annotations

import csv
import shutil
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import Any

from stages.claims.arms import start_values
from stages.claims.code import MODULES, code_of
from stages.claims.experiment import UNTRAINED
from stages.claims.plan import Outcome
from stages.claims.rows import curve_rows, steps_to_success, task_rows, window_mean
from stages.control.problems import PROBLEMS
from stages.records.episode import read_json, read_rows, write_json
from stages.records.sections import params_hash
from stages.runtime.cores import available_cores
from stages.runtime.git import git
from stages.runtime.preloaded import Preloaded
from stages.runtime.workspace import EvaluationWorkspace, RunFailedError, environment

FOLDER = Path(".bellwether/claims")
SOURCES = (".dvcignore", "data/base", "data/packages", "data/raw", "stages", "dvc.yaml", "params.yaml")
"""Paths of the commit that a workspace holds. Without .dvcignore, compiled modules, which name their folder, would count as code,
and no workspace would find in the cache what another has made."""
EVALUATION = Path("reports") / "evaluation.json"
ROWS = Path("data") / "evaluation" / "rows.parquet"
COST = ".seconds.json"
"""Of a start whose making no run's outcome has counted yet: the file beside it with its processor seconds."""
DVC = "from stages.runtime.parent import die_with_parent; die_with_parent(); from dvc.cli import main; raise SystemExit(main())"
"""DVC as a program that ends with its parent, so that a killed `make claims` leaves no process that writes into a workspace."""


def clean_commit(root: Path) -> str:
    """The commit that is checked out. Raises RunFailedError if SOURCES or profiles differ from it, since results name a
    commit."""
    changed = git(root, "status", "--porcelain", "--", *SOURCES, "profiles")
    if changed:
        raise RunFailedError(f"results name the commit they were measured at; commit these changes first:\n{changed}")
    return git(root, "rev-parse", "HEAD").strip()


def _nested(values: Any, key: str) -> float:
    for part in key.split("."):
        values = values[part]
    return float(values)


def _from_panel(folder: Path, domain: str, key: str) -> float:
    """Of several domains (a+b), the mean."""
    (domains,) = read_json(folder / EVALUATION)["models"].values()
    return fmean(_of_panel(domains[name], key) for name in domain.split("+"))


def _of_panel(metrics: Mapping[str, Any], key: str) -> float:
    if key.startswith("difficulty."):
        return float(metrics["by_difficulty"][key.removeprefix("difficulty.")]["success"])
    if key.startswith(("pass_at_k.", "distinct_at_k.")):
        return _nested(metrics, key)
    return float(metrics[key]["mean"])


def _from_history(folder: Path, domain: str, key: str) -> float:
    column, _, part = key.rpartition(".")
    reports = folder / "reports" / "rl"
    with (reports / f"{domain}_history.csv").open(encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    if column == "steps_to_success":
        successes, steps = ([float(row[name]) for row in rows] for name in ("success", "environment_steps"))
        return steps_to_success(successes, steps, int(part) / 100, float(read_json(reports / f"{domain}.json")["budget"]))
    return window_mean([float(row[column]) for row in rows if row[column]], part)


def read_metric(name: str, folder: Path, domain: str) -> float:
    """The metric `name` (see `Claim.metric`) of the run in `folder`. Raises RunFailedError if the run lacks it."""
    kind, _, key = name.partition(".")
    try:
        if kind == "panel":
            return _from_panel(folder, domain, key)
        if kind == "history":
            return _from_history(folder, domain, key)
        if kind == "sft":
            return _nested(read_json(folder / "reports" / "sft.json"), key)
        if kind == "utilities":
            (found,) = read_json(folder / "reports" / "evaluation.json")["utilities"]["models"].values()
            return _nested(found, key)
        return _nested(read_json(folder / "reports" / {"report": "rl"}.get(kind, kind) / f"{domain}.json"), key)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, FileNotFoundError) as error:
        raise RunFailedError(f"the run in {folder} has no metric '{name}' (not found: {error!r})") from error


def _read_metrics(metrics: Sequence[str], folder: Path, domain: str, required: Sequence[str] | None) -> dict[str, float | None]:
    """The metrics of the run in `folder`; None for those that it lacks and that are not `required` (None: all are). Raises
    RunFailedError."""
    found: dict[str, float | None] = {}
    for metric in metrics:
        try:
            found[metric] = read_metric(metric, folder, domain)
        except RunFailedError:
            if required is None or metric in required:
                raise
            found[metric] = None
    return found


@dataclass
class ExperimentRunner:
    """Runs of one `Experiment.program` at one commit of the checkout `root`."""

    root: Path
    commit: str
    threads: int = 1
    workers: int = 1
    """Processes that share the making of a start, if all runs wait for it; a run is one process."""
    program: str = "rl"
    _locks: dict[Path, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a lock of a folder is looked up."""
    _idle: dict[bool, SimpleQueue[Preloaded]] = field(default_factory=lambda: {True: SimpleQueue(), False: SimpleQueue()})
    """Processes that wait for the next run, by whether its model is a folder."""

    def close(self) -> None:
        """End the processes in which runs were made."""
        for idle in self._idle.values():
            while not idle.empty():
                idle.get().close()

    def _idle_process(self, local: bool) -> Preloaded | None:
        """One that waits and was not killed since; None if there is none."""
        with suppress(Empty):
            while (process := self._idle[local].get_nowait()).ended:
                process.close()
            return process
        return None

    def _run(self, workspace: EvaluationWorkspace, programs: Sequence[Sequence[str]], values: Mapping[str, Any]) -> float:
        """Run programs of the workspace one after another in one process; the processor seconds. `values`: params.yaml. Raises
        RunFailedError."""
        local = not (values.get("model") or {}).get("path", "").startswith("hub:")
        process = self._idle_process(local) or Preloaded(environment(self.threads), self.threads, local)
        try:
            return workspace.run(programs, process)
        finally:
            process.close() if process.ended else self._idle[local].put(process)

    def _alone_in(self, folder: Path) -> threading.Lock:
        """What a thread holds while it makes this folder, for which the others wait."""
        with self._lock:
            return self._locks.setdefault(folder, threading.Lock())

    @property
    def code(self) -> str:
        return code_of(self.root, self.program)

    @cached_property
    def folder(self) -> Path:
        """The same for all commits with equal data and equal code that bears on runs."""
        data = git(self.root, "ls-tree", self.commit, "--", *(path for path in SOURCES if path.startswith("data/"))).strip()
        return self.root / FOLDER / params_hash([data, self.code])

    def _check_out(self, workspace: EvaluationWorkspace) -> None:
        workspace.check_out(self.root, self.commit, SOURCES)

    def _link_model(self, workspace: EvaluationWorkspace, path: str) -> None:
        """Let a workspace find a base model that the commit does not hold. Raises RunFailedError if the checkout has none."""
        if path.startswith("hub:") or Path(path).is_absolute() or (workspace.folder / path).exists():
            return
        if not (self.root / path).exists():
            raise RunFailedError(
                f"the model {path} does not exist in {self.root}; docs/extending.md says how to make a model folder"
            )
        (workspace.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace.folder / path).symlink_to((self.root / path).resolve(), target_is_directory=True)

    def start(self, values: Mapping[str, Any]) -> EvaluationWorkspace:
        """The workspace in which everything before rl (lane merge: before the merge) is done, made once for all runs that share
        it."""
        domains, last = values["domains"], "rl" if self.program == "merge" else "annotate"
        values = {**values, "resources": {**values["resources"], "workers": self.workers}}

        def prepare(new: EvaluationWorkspace) -> None:
            self._check_out(new)
            self._link_model(new, values["model"]["path"])
            new.write_settings(values)
            targets = [f"{last}@{domain}" for domain in domains]
            self._count(workspace, new.python(["-c", DVC, "--wait-for-lock", "repro", *targets], self.threads))
            shutil.rmtree(new.folder / ".dvc")

        workspace = EvaluationWorkspace(self.folder / f"start-{'+'.join(domains)}-{params_hash(start_values(values))}")
        with self._alone_in(workspace.folder):
            workspace.create(prepare)
        return workspace

    def _count(self, start: EvaluationWorkspace, seconds: float) -> None:
        """Keep, also for a later session, what making this start took until a run's outcome has it."""
        cost = start.folder.with_suffix(COST)
        with self._alone_in(cost):
            write_json(cost, seconds + (read_json(cost) if cost.exists() else 0.0))

    def _made_in(self, start: EvaluationWorkspace) -> float:
        """The processor seconds that making this start took, for the first run that asks; 0.0 for the others."""
        cost = start.folder.with_suffix(COST)
        with self._alone_in(cost):
            if not cost.exists():
                return 0.0
            seconds = float(read_json(cost))
            cost.unlink()
        return round(seconds, 1)

    def start_success(self, values: Mapping[str, Any]) -> float:
        """Success of the SFT policy on the panel that the runs play; it plays once for all runs that evaluate alike."""
        start, domain = self.start(values), values["domains"][0]
        evaluate = {**values["evaluate"], "models": ["sft"]}
        found = start.folder.with_name(f"{start.folder.name}-{params_hash(evaluate)}.json")
        with self._alone_in(found):
            if not found.exists():
                workspace = EvaluationWorkspace(found.with_suffix(""))
                workspace.create(lambda new: new.copy_of(start))
                resources = {**values["resources"], "workers": self.workers}
                workspace.write_settings({**values, "resources": resources, "evaluate": evaluate})
                self._count(start, workspace.python(["-m", "stages.evaluate"], self.threads))
                write_json(found, read_json(workspace.folder / EVALUATION))
                workspace.remove()
        return float(read_json(found)["models"]["sft"][domain]["success"]["mean"])

    def release(self, name: str) -> None:
        """Remove what the run of this name left, whose outcome is stored."""
        EvaluationWorkspace(self.folder / name).remove()

    def _shared_workspace(self, common: Mapping[str, Any]) -> EvaluationWorkspace:
        """The workspace that all runs of a program of MODULES share."""
        if self.program in PROBLEMS:
            workspace = EvaluationWorkspace(self.folder / "control")
            with self._alone_in(workspace.folder):
                workspace.create(self._check_out)
            return workspace
        workspace = self.start(common)
        if self.program == "designs":  # on all cores, before the first search reads it
            with self._alone_in(workspace.folder):
                workspace.write_settings(common, "table.yaml")
                workers = available_cores() if common["resources"]["device"] == "cpu" else 1
                command = ["-m", MODULES[self.program], "--table", "--settings", "table.yaml", "--workers", str(workers)]
                workspace.python(command, 1)
        return workspace

    def measure(
        self,
        name: str,
        values: Mapping[str, Any],
        common: Mapping[str, Any],
        metrics: Sequence[str],
        required: Sequence[str] | None = None,
    ) -> Outcome:
        """One run of a program of MODULES; `common`: params.yaml of what its runs share; `required` as in `train_and_evaluate`.
        Raises RunFailedError."""
        workspace = self._shared_workspace(common)
        if model := (values.get("decision") or {}).get("model"):  # of an adviser in lane control
            with self._alone_in(workspace.folder):
                self._link_model(workspace, model)
        settings, result = f"{name}.yaml", f"{name}.result.json"
        workspace.write_settings(values, settings)
        files = ["--settings", settings, "--result", result, "--threads", str(self.threads)]
        seconds = self._run(workspace, [[MODULES[self.program], *files]], common)
        found = read_json(workspace.folder / result)
        steps = found.pop("environment_steps")
        missing = sorted(set(metrics if required is None else required) - set(found))
        if missing:
            raise RunFailedError(f"{name} has no metric '{missing[0]}'; it has {', '.join(found)}")
        measured = {metric: found.get(metric) for metric in metrics}
        made = self._made_in(workspace)
        return Outcome(measured, steps, round(seconds, 1), self.commit, self.code, start_seconds=made)

    def train_and_evaluate(
        self,
        name: str,
        values: Mapping[str, Any],
        metrics: Sequence[str],
        trains: bool = True,
        required: Sequence[str] | None = None,
    ) -> Outcome:
        """One run of lane rl, or (not `trains`) one that plays the SFT policy. Resumes an interrupted run of this name; seconds
        are then those since. Metrics that are not `required` (None: all are) are None where the run lacks them. Raises
        RunFailedError."""
        domain, workspace = values["domains"][0], EvaluationWorkspace(self.folder / name)
        start = self.start(values)
        workspace.create(lambda new: new.copy_of(start))
        workspace.write_settings(values)
        report = workspace.folder / "reports" / ("rl" if trains else "annotate") / f"{domain}.json"
        training = [] if report.exists() else [["stages.rl", "--domain", domain]]
        seconds = self._run(workspace, [*training, ["stages.evaluate"]], values)
        found = _read_metrics(metrics, workspace.folder, domain, required)
        return Outcome(
            *(found, read_json(report)["environment_steps"], round(seconds, 1), self.commit, self.code),
            rows=task_rows(read_rows(workspace.folder / ROWS)),
            curve=curve_rows(workspace.folder / "reports" / "rl" / f"{domain}_history.csv"),
            start_seconds=self._made_in(start),
        )

    def merge_and_evaluate(
        self, name: str, values: Mapping[str, Any], metrics: Sequence[str], required: Sequence[str] | None = None
    ) -> Outcome:
        """One run of lane merge: the specialists of its seed are merged, and the result plays all panels. Their training counts
        as seconds of the start. `required` as in `train_and_evaluate`. Raises RunFailedError."""
        workspace, start = EvaluationWorkspace(self.folder / name), self.start(values)
        workspace.create(lambda new: new.copy_of(start))
        workspace.write_settings(values)
        merge = [] if set(values["evaluate"]["models"]) <= UNTRAINED else [["stages.merge"]]
        seconds = self._run(workspace, [*merge, ["stages.evaluate"]], values)
        found = _read_metrics(metrics, workspace.folder, "+".join(values["domains"]), required)
        rows = [
            {**row, **{name: f"{row['domain']}:{row[name]}" for name in ("task_id", "cluster")}}
            for row in read_rows(workspace.folder / ROWS)
        ]
        sizes = Counter(row["domain"] for row in rows)
        if len(set(sizes.values())) > 1:
            raise RunFailedError(f"{name}: panels count alike only with equally many episodes, and have {dict(sizes)}")
        made = self._made_in(start)
        return Outcome(found, 0, round(seconds, 1), self.commit, self.code, rows=task_rows(rows), start_seconds=made)
