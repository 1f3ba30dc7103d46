"""Stages killed with SIGKILL at random moments, several times in a row, and restarted: they must write the bytes of the
undisturbed run.

`python -m tests.fuzz kills --count 36` first makes a whole run of the tiny profile; `--source FOLDER` uses a copy of a finished
checkout instead, such as one of the default run. Each stage first runs undisturbed once, which measures its duration and shows
that it is reproducible."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.lifecycle.checkout import DVC, Checkout, export
from tests.tiny import make_tiny_policy

from .outcomes import ACCEPTED, LOST, REFUSED, Outcome

IN_A_ROW = 3
"""Consecutive kills of a stage."""
VICTIMS = ("all", "stage", "dvc")
"""What is killed: `dvc repro` with all its descendants, the stage's own process, or DVC alone, with which the stage must end."""
STAGE_TIMEOUT_S = 3600
"""A restarted stage that takes longer hangs."""
ORPHAN_TIMEOUT_S = 60
"""Processes whose parent was killed must end within this time."""


@dataclass
class FinishedRun:
    """A finished run whose stages are killed. `lock`: stage -> its entry in dvc.lock; `seconds`: stage -> its duration."""

    checkout: Checkout
    lock: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.committed = (self.checkout.root / "dvc.lock").read_bytes()

    def same(self, stage: str) -> bool:
        return self.checkout.lock[stage] == self.lock[stage]

    def restore_truncated_lock(self) -> bool:
        """Whether a kill truncated dvc.lock, which DVC writes in place; then restore it, as `git checkout dvc.lock` does where it
        is committed. Raises RuntimeError if DVC does not report the truncated file."""
        try:
            if self.checkout.lock.keys() >= self.lock.keys():
                return False
        except (yaml.YAMLError, KeyError, TypeError):
            command = [*DVC, "status", "dvc.yaml"]
            done = subprocess.run(
                command, cwd=self.checkout.root, env=self.checkout.env, capture_output=True, text=True, check=False
            )
            if done.returncode == 0 or "dvc.lock" not in done.stderr:
                raise RuntimeError(f"DVC does not name the truncated dvc.lock: {done.stderr[-300:]}") from None
        (self.checkout.root / "dvc.lock").write_bytes(self.committed)
        return True


def tiny_run(folder: Path) -> FinishedRun:
    """A new run of the tiny profile in `folder`."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    checkout = Checkout.make(folder / "run", export(tree, make_tiny_policy(folder / "policy")))
    checkout.repro()
    return FinishedRun(checkout, checkout.lock)


def copied_run(source: Path, folder: Path) -> FinishedRun:
    """A copy of the finished run `source` in `folder`. Raises ValueError if the run is not finished."""
    shutil.copytree(
        source,
        folder / "run",
        symlinks=True,
        ignore=shutil.ignore_patterns(".venv", ".git", ".bellwether", ".prefect", "mlartifacts", "mlflow.db*"),
    )
    checkout = Checkout(folder / "run")
    subprocess.run(["git", "init", "--quiet"], cwd=checkout.root, check=True)
    if checkout.changed:
        raise ValueError(f"{source} is not a finished run: {', '.join(checkout.changed)} changed since; run 'dvc repro' there")
    return FinishedRun(checkout, checkout.lock)


def start(finished_run: FinishedRun, stage: str) -> subprocess.Popen[bytes]:
    command = [*DVC, "repro", "--force", "--single-item", stage]
    log = (finished_run.checkout.root.parent / "log").open("wb")
    with log:
        return subprocess.Popen(command, cwd=finished_run.checkout.root, env=finished_run.checkout.env, stdout=log, stderr=log)


def log_tail(finished_run: FinishedRun) -> str:
    return (finished_run.checkout.root.parent / "log").read_text(encoding="utf-8", errors="replace")[-1500:]


def kill_after(finished_run: FinishedRun, stage: str, seconds: float, victim: str) -> bool:
    """Start the stage and kill `victim` after `seconds`; False if it ended before. Raises RuntimeError if a process outlives the
    kill."""
    process = start(finished_run, stage)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return False
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    chosen = everyone
    if victim == "dvc":
        chosen = everyone[:1]
    elif victim == "stage":
        chosen = [one for one in everyone if _is_stage(one)][:1] or everyone
    for one in chosen:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(ORPHAN_TIMEOUT_S)
    left = psutil.wait_procs(everyone, ORPHAN_TIMEOUT_S)[1]
    if left:
        raise RuntimeError(f"{stage}: {left} outlived the kill of {victim}")
    return True


def _is_stage(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(part.startswith("stages.") for part in process.cmdline())
    return False


def run_to_end(finished_run: FinishedRun, stage: str) -> bool:
    """Run the stage to its end; whether it succeeded with the bytes of the finished run."""
    process = start(finished_run, stage)
    try:
        process.wait(STAGE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return process.returncode == 0 and finished_run.same(stage)


def measure(finished_run: FinishedRun, stage: str) -> float:
    """Duration of the undisturbed stage in seconds. Raises ValueError if it is not reproducible."""
    if stage not in finished_run.seconds:
        began = time.monotonic()
        if not run_to_end(finished_run, stage):
            raise ValueError(f"{stage} is not reproducible here, even without kills:\n{log_tail(finished_run)}")
        finished_run.seconds[stage] = time.monotonic() - began
    return finished_run.seconds[stage]


def attempt(finished_run: FinishedRun, stage: str, rng: random.Random, kills: int = IN_A_ROW) -> list[tuple[str, Outcome]]:
    """At most `kills` consecutive kills of `stage`, each at a random moment of its duration: (victim and time, outcome) of
    each."""
    length, names, cut = measure(finished_run, stage), [], []
    try:
        while len(names) < kills:
            moment, victim = rng.uniform(0.02, 0.98) * length, rng.choice(VICTIMS)
            if kill_after(finished_run, stage, moment, victim):
                names.append(f"{stage}: {victim} after {moment:.1f} s")
                cut.append(finished_run.restore_truncated_lock())
            elif not finished_run.same(stage):
                break
            else:
                length *= 0.7  # a stage that resumes takes less time
        ended = finished_run.same(stage) if len(names) < kills else run_to_end(finished_run, stage)
        outcome = Outcome(ACCEPTED) if ended else Outcome(LOST, f"other bytes, or a failure: {log_tail(finished_run)[-400:]}")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        outcome = Outcome(LOST, str(error))
    named = Outcome(REFUSED, "DVC names the truncated dvc.lock; after 'git checkout dvc.lock' the stage writes the same bytes")
    found = [named if refused and outcome.kind == ACCEPTED else outcome for refused in cut]
    return (
        list(zip(names, found, strict=False)) if len(found) == len(names) > 0 else [(name, outcome) for name in names or [stage]]
    )


def cases(seed: int, count: int, source: Path | None = None) -> Iterator[tuple[str, Outcome]]:
    """`count` kills, over the stages in turn. Raises ValueError if `source` is not a finished run."""
    left = count
    with tempfile.TemporaryDirectory(prefix="bellwether-kills-", ignore_cleanup_errors=True) as folder:
        finished_run = copied_run(source, Path(folder)) if source else tiny_run(Path(folder))
        turn = 0
        while left > 0:
            stages = list(finished_run.lock)
            stage = stages[turn % len(stages)]
            for found in attempt(finished_run, stage, random.Random(f"kills/{seed}/{turn}"), min(left, IN_A_ROW)):
                left -= 1
                yield found
            turn += 1
