"""Where experiments run: copies of the committed checkout, in which the ordinary stages do the work.

One copy per start is brought up to what rl needs by `dvc repro`, with this checkout's DVC cache, so that the SFT policy of an
environment is trained once and serves all arms and seeds. Each run then works in a copy of that copy. A run that was killed goes
on from its checkpoint; the copies of finished runs are removed.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stages.claims.experiment import digest, start_values
from stages.records.episode import read_json, write_json
from stages.runtime.files import atomic_text

PLACE = Path(".bellwether/claims")
SOURCES = ("data/base", "data/packages", "data/raw", "stages", "dvc.yaml", "params.yaml")
"""What is copied of the commit."""
START = "start.json"
"""In a start's copy: what the evaluation of its SFT policy found."""
DVC = "from stages.runtime.parent import die_with_parent; die_with_parent(); from dvc.cli import main; raise SystemExit(main())"
"""DVC as a program that ends with the one that started it, as stages do by themselves: a killed `make claims` leaves nobody
behind who writes into the copy that the next one makes anew."""
_TAIL = 2000
"""Characters of a failed stage's output that are told."""


class RunFailedError(RuntimeError):
    """A stage of a run failed; the message holds the end of what it said."""


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, errors="replace", check=True
    ).stdout.strip()


def clean_commit(root: Path) -> str:
    """The commit that is checked out. Raises RunFailedError if what runs are made of differs from it: results name a commit."""
    changed = git(root, "status", "--porcelain", "--", *SOURCES)
    if changed:
        raise RunFailedError(f"results belong to a commit, and these files differ from it; commit them first:\n{changed}")
    return git(root, "rev-parse", "HEAD")


def environment(threads: int) -> dict[str, str]:
    """The stages' environment: nothing of a DVC or lifecycle run around this one, and no tracking unless it was asked for."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "LIFECYCLE_", "MLFLOW_RUN"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {"BELLWETHER_TRACKING": "off", **kept, "PATH": path, "OMP_NUM_THREADS": str(threads)}


def command(arguments: Sequence[str], folder: Path, threads: int) -> None:
    """Run Python with `arguments` in `folder`; its output goes to run.log there. Raises RunFailedError."""
    with (folder / "run.log").open("a", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(threads),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        said = (folder / "run.log").read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        raise RunFailedError(f"'{' '.join(arguments)}' in {folder} ended with {done.returncode}:\n{said}")


def measure(name: str, folder: Path, domain: str) -> float:
    """The metric `name` (see `Claim.metric`) of the run in `folder`. Raises RunFailedError for one that the run does not have."""
    kind, _, key = name.partition(".")
    try:
        if kind == "panel":
            (played,) = read_json(folder / "reports" / "evaluation.json")["models"].values()
            found = played[domain]
            if key.startswith("difficulty."):
                return float(found["by_difficulty"][key.removeprefix("difficulty.")]["success"])
            counted, _, k = key.partition(".")
            if counted in ("pass_at_k", "distinct_at_k"):
                return float(found[counted][k])
            return float(found[key]["mean"])
        if kind in ("annotate", "report"):
            value = read_json(folder / "reports" / {"report": "rl"}.get(kind, kind) / f"{domain}.json")
            for part in key.split("."):
                value = value[part]
            return float(value)
        column, _, part = key.rpartition(".")
        with (folder / "reports" / "rl" / f"{domain}_history.csv").open(encoding="utf-8") as handle:
            values = [float(row[column]) for row in csv.DictReader(handle) if row[column]]
        window = max(1, len(values) // 5)
        chosen = {"mean": values, "first": values[:window], "last": values[-window:]}[part]
        return sum(chosen) / len(chosen)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RunFailedError(f"the run in {folder} has no metric '{name}' ({error!r} is not there)") from error


@dataclass
class Workshop:
    """Runs of one commit of the checkout `root`."""

    root: Path
    commit: str
    threads: int = 1
    _guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def folder(self) -> Path:
        return self.root / PLACE / self.commit[:12]

    def _export(self, target: Path) -> None:
        """The commit's files, and a DVC project of their own over this checkout's cache."""
        target.mkdir(parents=True)
        with subprocess.Popen(["git", "archive", self.commit, "--", *SOURCES], cwd=self.root, stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x", "-C", str(target)], stdin=archive.stdout, check=True)
        if archive.returncode:
            raise RunFailedError(f"git archive of {self.commit} failed")
        cache = self.root / ".dvc" / "cache"
        settings = f"[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n[cache]\n    dir = {cache}\n"
        atomic_text(target / ".dvc" / "config", settings)

    def start(self, values: Mapping[str, Any]) -> Path:
        """A copy in which everything before rl is done, made once for all runs that share it."""
        domain = values["domains"][0]
        made = self.folder / f"start-{domain}-{digest(start_values(values))}"
        with self._guard:
            if not made.exists():
                partial = made.with_name(f"{made.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                self._export(partial)
                write_params(partial, values)
                command(["-c", DVC, "--wait-for-lock", "repro", f"annotate@{domain}"], partial, self.threads)
                shutil.rmtree(partial / ".dvc")
                # How good the start is, on the panel that the runs are going to play.
                write_params(partial, {**values, "evaluate": {**values["evaluate"], "models": ["sft"]}})
                command(["-m", "stages.evaluate"], partial, self.threads)
                (partial / "reports" / "evaluation.json").rename(partial / START)
                partial.rename(made)
        return made

    def start_success(self, values: Mapping[str, Any]) -> float:
        """Success of the SFT policy on the panel."""
        domain = values["domains"][0]
        return float(read_json(self.start(values) / START)["models"]["sft"][domain]["success"]["mean"])

    def judge_labels(
        self, name: str, values: Mapping[str, Any], common: Mapping[str, Any], metrics: Sequence[str]
    ) -> dict[str, Any]:
        """One run of lane labels, in the copy that all of them start from; as `play`. Raises RunFailedError."""
        return self._measured("stages.claims.mcts_labels", name, values, self.start(common), metrics)

    def search_designs(
        self, name: str, values: Mapping[str, Any], common: Mapping[str, Any], metrics: Sequence[str]
    ) -> dict[str, Any]:
        """One run of lane designs, on the table that all of them share, which the first of them makes, on all cores; as `play`.
        Raises RunFailedError."""
        folder, module = self.start(common), "stages.claims.design_search"
        with self._guard:
            write_settings(folder / "table.yaml", common)
            workers = os.cpu_count() or 1 if values["resources"]["device"] == "cpu" else 1
            command(["-m", module, "--table", "--settings", "table.yaml", "--workers", str(workers)], folder, 1)
        return self._measured(module, name, values, folder, metrics)

    def _measured(
        self, module: str, name: str, values: Mapping[str, Any], folder: Path, metrics: Sequence[str]
    ) -> dict[str, Any]:
        """What `module` finds in `folder` under the parameters `values`."""
        began = time.monotonic()
        settings, result = folder / f"{name}.yaml", folder / f"{name}.result.json"
        write_settings(settings, values)
        files = ["--settings", settings.name, "--result", result.name, "--threads", str(self.threads)]
        command(["-m", module, *files], folder, self.threads)
        found = read_json(result)
        return {
            "metrics": {metric: found[metric] for metric in sorted(set(metrics))},
            "environment_steps": found["environment_steps"],
            "seconds": round(time.monotonic() - began, 1),
            "commit": self.commit,
        }

    def learn_offline(self, name: str, values: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
        """One run of lane offline_q; as `play`. Raises RunFailedError."""
        made = self.folder / "offline"
        with self._guard:
            if not made.exists():
                partial = made.with_name("offline.partial")
                shutil.rmtree(partial, ignore_errors=True)
                self._export(partial)
                partial.rename(made)
        began = time.monotonic()
        settings, result = made / f"{name}.json", made / f"{name}.result.json"
        write_json(settings, dict(values))
        files = ["--settings", settings.name, "--result", result.name, "--threads", str(self.threads)]
        command(["-m", "stages.control.offline_q", *files], made, self.threads)
        found = read_json(result)
        missing = [metric for metric in metrics if metric.removeprefix("offline.") not in found]
        if missing:
            raise RunFailedError(f"{name} has no metric '{missing[0]}'; there are {', '.join(f'offline.{key}' for key in found)}")
        outcome = {"metrics": {metric: found[metric.removeprefix("offline.")] for metric in sorted(set(metrics))}}
        return {**outcome, "environment_steps": 0, "seconds": round(time.monotonic() - began, 1), "commit": self.commit}

    def play(
        self,
        name: str,
        values: Mapping[str, Any],
        metrics: Sequence[str],
        trains: bool = True,
        required: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Train (unless the SFT policy is what plays) and evaluate one run; its metrics, the environment steps it took and its
        seconds. Metrics that are not among `required` (None: all are) are None where the run does not have them.

        Where a run of this name was killed before, it goes on; the seconds are then those since. Raises RunFailedError.
        """

        def found(metric: str) -> float | None:
            try:
                return measure(metric, folder, domain)
            except RunFailedError:
                if required is None or metric in required:
                    raise
                return None

        domain = values["domains"][0]
        folder = self.folder / name
        start = self.start(values)
        if not folder.exists():
            partial = folder.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(start, partial)
            partial.rename(folder)
        write_params(folder, values)
        began = time.monotonic()
        told = folder / "reports" / ("rl" if trains else "annotate") / f"{domain}.json"
        if not told.exists():
            command(["-m", "stages.rl", "--domain", domain], folder, self.threads)
        command(["-m", "stages.evaluate"], folder, self.threads)
        report = read_json(told)
        outcome = {
            "metrics": {metric: found(metric) for metric in sorted(set(metrics))},
            "environment_steps": report["environment_steps"],
            "seconds": round(time.monotonic() - began, 1),
            "commit": self.commit,
        }
        # Gone at once under its name, or a run that was killed here would go on in what is left of it.
        done = folder.with_name(f"{name}.done")
        shutil.rmtree(done, ignore_errors=True)
        shutil.rmtree(folder.rename(done))
        return outcome


def write_settings(path: Path, values: Mapping[str, Any]) -> None:
    atomic_text(path, yaml.safe_dump(dict(values), sort_keys=False))


def write_params(folder: Path, values: Mapping[str, Any]) -> None:
    write_settings(folder / "params.yaml", {name: value for name, value in values.items() if name != "design"})
