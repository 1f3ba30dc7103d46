"""What every stage is started by: parameters, threads, progress, tracking, errors that tell what to do.

A stage is `def run(context: StageContext) -> None`; its module ends with `raise SystemExit(stage_run("name", run))`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.lineage import input_hashes, output_hashes
from stages.params import Params, load_params
from stages.progress import Progress, progress
from stages.tracking import Tracker, open_tracker
from stages.validation import ParamsError


@dataclass
class StageContext:
    """What a stage gets. All paths it writes are below `data` and `reports`, under its own name."""

    name: str
    domain: str | None
    params: Params
    root: Path
    tracker: Tracker

    @property
    def title(self) -> str:
        """The stage as DVC calls it, e.g. `rl@search`."""
        return f"{self.name}@{self.domain}" if self.domain else self.name

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    def section(self, name: str) -> Any:
        """A section of params.yaml with this stage's domain's overrides in it."""
        return self.params.section(name, self.domain) if self.domain else getattr(self.params, name)

    @contextmanager
    def progress(self, label: str, total: int, unit: str = "step") -> Iterator[Progress]:
        with progress(f"{self.title}: {label}", total, unit) as bar:
            yield bar

    def log_params(self, values: dict[str, Any]) -> None:
        self.tracker.params(values)

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self.tracker.metric(name, value, step)

    def artifact(self, path: Path) -> None:
        self.tracker.artifact(path)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent goes (Linux), so that a killed `dvc repro` leaves no stage behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)


def quiet_environment(threads: int, local_model: bool = True) -> None:
    """Thread counts and offline switches; must come before torch or transformers are imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost six times the CPU where cores are shared
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if local_model:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def stage_run(name: str, run: Callable[[StageContext], None], per_domain: bool = False) -> int:
    """Run one stage from the command line; returns the exit code (0 done, 1 failed, 2 bad parameters or input)."""
    parser = argparse.ArgumentParser(prog=f"python -m stages.{name}", description=(sys.modules["__main__"].__doc__ or "").strip())
    if per_domain:
        parser.add_argument("--domain", required=True, help="one of `domains` in params.yaml")
    options = parser.parse_args()
    domain: str | None = getattr(options, "domain", None)
    die_with_parent()
    root = Path.cwd()
    try:
        params = load_params(root / "params.yaml")
        if domain is not None and domain not in params.domains:
            raise ParamsError(f"--domain {domain} is not among `domains` in params.yaml: {', '.join(params.domains)}")
    except ParamsError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    quiet_environment(params.resources.threads, not params.model.path.startswith("hub:"))
    tracker = open_tracker(root, name, domain, params)
    context = StageContext(name, domain, params, root, tracker)
    status = "FAILED"
    try:
        tracker.inputs(input_hashes(root, name, domain))
        run(context)
        tracker.outputs(output_hashes(root, name, domain))
        status = "FINISHED"
        return 0
    except (ParamsError, ValueError, FileNotFoundError, OSError) as error:
        if os.environ.get("BELLWETHER_DEBUG"):
            raise
        print(f"{context.title}: {error}\n(BELLWETHER_DEBUG=1 shows where this came from)", file=sys.stderr)
        return 2 if isinstance(error, ParamsError) else 1
    except KeyboardInterrupt:
        status = "KILLED"
        return 130
    finally:
        tracker.close(status)
