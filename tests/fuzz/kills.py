"""Stages killed with SIGKILL at random moments, several times in a row, and started again: they end in the bytes of the run that
was left in peace.

`python -m tests.fuzz kills --count 36` makes a whole run of the tiny profile first, for its bytes; `--source FOLDER` takes a
finished checkout in its place (copied, never changed), such as one of the default run. How long a stage takes is measured once,
and shows that it repeats itself without kills.
"""

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
"""Kills of a stage before it may end."""
VICTIMS = ("all", "stage", "dvc")
"""What is killed: `dvc repro` with all that it started, the stage's own process, or DVC alone, which the stage has to follow."""
ENDLESS_S = 3600
"""A stage that is not done by then, having been started again, hangs."""
FOLLOW_S = 60
"""What was left alone by its parent has ended by then."""


@dataclass
class Ground:
    """A finished run to kill stages in. `lock`: stage -> its entry in dvc.lock; `seconds`: stage -> how long it takes."""

    checkout: Checkout
    lock: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.committed = (self.checkout.root / "dvc.lock").read_bytes()

    def same(self, stage: str) -> bool:
        return self.checkout.lock[stage] == self.lock[stage]

    def cut_lock(self) -> bool:
        """Whether a kill came while DVC wrote dvc.lock, which it does in place. Then that is restored, as `git checkout dvc.lock`
        does in a checkout where it is committed. Raises RuntimeError if DVC takes a broken one without a word."""
        try:
            if self.checkout.lock.keys() >= self.lock.keys():
                return False
        except (yaml.YAMLError, KeyError, TypeError):
            command = [*DVC, "status", "dvc.yaml"]
            done = subprocess.run(
                command, cwd=self.checkout.root, env=self.checkout.env, capture_output=True, text=True, check=False
            )
            if done.returncode == 0 or "dvc.lock" not in done.stderr:
                raise RuntimeError(f"DVC does not name the broken dvc.lock: {done.stderr[-300:]}") from None
        (self.checkout.root / "dvc.lock").write_bytes(self.committed)
        return True


def tiny_ground(folder: Path) -> Ground:
    """A new run of the tiny profile below `folder`."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    checkout = Checkout.make(folder / "run", export(tree, make_tiny_policy(folder / "policy")))
    checkout.repro()
    return Ground(checkout, checkout.lock)


def copied_ground(source: Path, folder: Path) -> Ground:
    """A copy of the finished run in `source` below `folder`. Raises ValueError if that is not finished."""
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
    return Ground(checkout, checkout.lock)


def started(ground: Ground, stage: str) -> subprocess.Popen[bytes]:
    command = [*DVC, "repro", "--force", "--single-item", stage]
    log = (ground.checkout.root.parent / "said").open("wb")
    with log:
        return subprocess.Popen(command, cwd=ground.checkout.root, env=ground.checkout.env, stdout=log, stderr=log)


def said(ground: Ground) -> str:
    return (ground.checkout.root.parent / "said").read_text(encoding="utf-8", errors="replace")[-1500:]


def killed_after(ground: Ground, stage: str, seconds: float, victim: str) -> bool:
    """Start the stage and kill `victim` after so many seconds; False if it was done before. Raises RuntimeError where something
    that was started outlives the kill."""
    process = started(ground, stage)
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
    process.wait(FOLLOW_S)
    left = psutil.wait_procs(everyone, FOLLOW_S)[1]
    if left:
        raise RuntimeError(f"{stage}: {left} outlived the kill of {victim}")
    return True


def _is_stage(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(part.startswith("stages.") for part in process.cmdline())
    return False


def finished(ground: Ground, stage: str) -> bool:
    """Run the stage to its end; whether it ended well, in the bytes of the finished run."""
    process = started(ground, stage)
    try:
        process.wait(ENDLESS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return process.returncode == 0 and ground.same(stage)


def measured(ground: Ground, stage: str) -> float:
    """Seconds that the stage takes when it is left in peace. Raises ValueError if it does not even then repeat itself."""
    if stage not in ground.seconds:
        began = time.monotonic()
        if not finished(ground, stage):
            raise ValueError(f"{stage} does not repeat itself here, without any kill:\n{said(ground)}")
        ground.seconds[stage] = time.monotonic() - began
    return ground.seconds[stage]


def attempt(ground: Ground, stage: str, rng: random.Random, kills: int = IN_A_ROW) -> list[tuple[str, Outcome]]:
    """At most `kills` kills of `stage` in a row, each at a moment drawn from its whole length; (what was killed and when,
    outcome) of each."""
    length, names, cut = measured(ground, stage), [], []
    try:
        while len(names) < kills:
            moment, victim = rng.uniform(0.02, 0.98) * length, rng.choice(VICTIMS)
            if killed_after(ground, stage, moment, victim):
                names.append(f"{stage}: {victim} after {moment:.1f} s")
                cut.append(ground.cut_lock())
            elif not ground.same(stage):
                break
            else:
                length *= 0.7  # what earlier kills have left takes less time
        ended = ground.same(stage) if len(names) < kills else finished(ground, stage)
        outcome = Outcome(ACCEPTED) if ended else Outcome(LOST, f"other bytes, or no end: {said(ground)[-400:]}")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        outcome = Outcome(LOST, str(error))
    named = Outcome(
        REFUSED, "DVC names dvc.lock, which it was writing; with 'git checkout dvc.lock' the stage ends in the same bytes"
    )
    found = [named if refused and outcome.kind == ACCEPTED else outcome for refused in cut]
    return (
        list(zip(names, found, strict=False)) if len(found) == len(names) > 0 else [(name, outcome) for name in names or [stage]]
    )


def cases(seed: int, count: int, source: Path | None = None) -> Iterator[tuple[str, Outcome]]:
    """`count` kills, stages taking turns. Raises ValueError for a source that is no finished run."""
    left = count
    with tempfile.TemporaryDirectory(prefix="bellwether-kills-", ignore_cleanup_errors=True) as folder:
        ground = copied_ground(source, Path(folder)) if source else tiny_ground(Path(folder))
        turn = 0
        while left > 0:
            stages = list(ground.lock)
            stage = stages[turn % len(stages)]
            for found in attempt(ground, stage, random.Random(f"kills/{seed}/{turn}"), min(left, IN_A_ROW)):
                left -= 1
                yield found
            turn += 1
