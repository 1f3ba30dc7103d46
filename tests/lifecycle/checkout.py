"""A separate checkout for whole-pipeline tests: the working tree's files, a tiny random base model, the tiny profile."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stages.runtime.overlay import overlaid, write_params
from stages.tracking.spool import spools

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(__file__).with_name("tiny.yaml")
DVC = [sys.executable, "-m", "dvc", "--wait-for-lock"]
_LINE = re.compile(r"^(?:(Running) stage|Stage) '([^':]+)'(?: (is cached|didn't change))?", re.M)
"""DVC's output for a stage of dvc.yaml; stages of other files have the file and a colon before their names."""


def export(target: Path, base: Path) -> Path:
    """Copy what git tracks, or would track, into `target`, with `base` as the base model and the tiny profile applied, without
    outputs of stages."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "data/base/")) and name != "dvc.lock":
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    shutil.copytree(base, target / "data" / "base")
    write_params(target / "params.yaml", overlaid(target / "params.yaml", TINY))
    path = target / "params.yaml"
    values = yaml.safe_load(path.read_text())
    # What the default run overrides per domain would undo the tiny profile.
    for overrides in values["per_domain"].values():
        overrides.update(curate={}, rollout={}, annotate={}, rl={})
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return target


@dataclass
class Checkout:
    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, root: Path, source: Path, **environment: str) -> Checkout:
        """A new git checkout in `root` of the files in `source`, which `export` made."""
        shutil.copytree(source, root)
        subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
        return cls(root, environment)

    def copy(self, root: Path) -> Checkout:
        """A copy with all outputs, DVC's cache included."""
        shutil.copytree(self.root, root, symlinks=True)
        return Checkout(root, self.environment)

    @property
    def env(self) -> dict[str, str]:
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("DVC_", "MLFLOW_", "LIFECYCLE_", "BELLWETHER_"))
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**clean, "PATH": path, "PYTHONPATH": "", "BELLWETHER_TRACKING": "off", **self.environment}

    def edit(self, changes: dict[str, Any]) -> None:
        """Merge `changes` into params.yaml."""
        overlay = self.root / ".overlay.yaml"
        overlay.write_text(yaml.safe_dump(changes))
        write_params(self.root / "params.yaml", overlaid(self.root / "params.yaml", overlay))
        overlay.unlink()

    def repro(self, *arguments: str) -> tuple[list[str], list[str]]:
        """(stages of the lifecycle that ran, stages restored from the cache), in order. Fails with DVC's output if DVC fails."""
        done = subprocess.run(
            [*DVC, "repro", *arguments], cwd=self.root, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        ran, restored = [], []
        for match in _LINE.finditer(done.stdout):
            if match[1]:
                ran.append(match[2])
            elif match[3] == "is cached":
                restored.append(match[2])
        return ran, restored

    def side_by_side(self) -> None:
        """Run all stages of a clean checkout, two at a time."""
        command = [sys.executable, "-m", "flows.pipeline", "--jobs", "2"]
        done = subprocess.run(command, cwd=self.root, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert "lifecycle: 12 stages to run, 2 at a time" in done.stdout

    @property
    def changed(self) -> list[str]:
        """Stages of the lifecycle whose parameters or inputs differ from dvc.lock, without those that only depend on them;
        sorted."""
        done = subprocess.run(
            [*DVC, "status", "--json", "dvc.yaml"], cwd=self.root, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
        return sorted(json.loads(done.stdout))

    def repro_killed_in(self, stage: str, *arguments: str, within_s: float = 300.0) -> None:
        """Start `dvc repro` and kill -9 all of it as soon as `stage` has written a checkpoint."""
        folder = self.root / ".bellwether" / "checkpoints" / stage
        with subprocess.Popen(
            [*DVC, "repro", *arguments],
            cwd=self.root,
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            deadline = time.monotonic() + within_s
            while not list(folder.glob("*/*.pt")):
                assert process.poll() is None, f"the run ended before {stage} wrote a checkpoint"
                assert time.monotonic() < deadline, f"{stage} wrote no checkpoint"
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert list(folder.glob("*/*.pt")), f"{stage} was done before it was killed"

    def wait_for_tracking(self, within_s: float = 120.0) -> None:
        """Wait for events that followers still send after their stages' end, then send the rest."""
        deadline = time.monotonic() + within_s / 2
        while spools(self.root) and time.monotonic() < deadline:
            time.sleep(0.2)
        if spools(self.root):
            command = [sys.executable, "-m", "stages.tracking", "--replay"]
            subprocess.run(command, cwd=self.root, env={**self.env, "BELLWETHER_TRACKING": "on"}, check=True, timeout=within_s)

    @property
    def lock(self) -> dict[str, Any]:
        return yaml.safe_load((self.root / "dvc.lock").read_text())["stages"]
