"""What running a stage cost this machine: seconds, processor seconds, peak memory.

Measured by whoever starts a stage and kept in `.bellwether/costs`, outside DVC's outputs, which must be the same bytes however
long they took. A run that was interrupted and taken up again counts as one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.runtime.files import atomic_text

FOLDER = Path(".bellwether") / "costs"


@dataclass(frozen=True)
class Cost:
    """`inputs` names what the stage was run on (see `lineage.identity`); `runs`: how often it was started until it was done."""

    inputs: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the stage and of the worker processes it ended, user and system."""
    peak_bytes: int = 0
    """The largest resident memory of any one of its processes."""
    peak_gpu_bytes: int = 0
    """The most that tensors took on the GPU, where there is one."""
    machine: str = ""
    runs: int = 0
    done: bool = False


def cost_file(root: Path, title: str) -> Path:
    return root / FOLDER / f"{title}.json"


def read_cost(root: Path, title: str) -> Cost | None:
    """The cost of the last run of stage `title` (`rl@search`) in checkout `root`; None if there is none that can be read."""
    try:
        return Cost(**json.loads(cost_file(root, title).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _usage() -> tuple[float, int]:
    """(processor seconds, peak bytes) of this process and of its children that have ended."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    unit = 1 if sys.platform == "darwin" else 1024
    return sum(use.ru_utime + use.ru_stime for use in found), max(use.ru_maxrss for use in found) * unit


def _gpu() -> tuple[str, int]:
    """(name, peak bytes) of the GPU that this process has used; ("", 0) if it has used none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "", 0
    return torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()


def machine() -> str:
    """What the numbers are measured on: processor, cores that this process may use, GPU if it has used one."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ", ".join(filter(None, (named[1] if named else platform.machine(), f"{cores} cores", _gpu()[0])))


@contextmanager
def measured(root: Path, title: str, inputs: str) -> Iterator[None]:
    """Measure what runs inside. Never raises on its own account: a disk that is full costs the numbers, not the stage."""
    before = read_cost(root, title)
    if before is None or before.done or before.inputs != inputs:
        before = Cost(inputs)
    started = time.perf_counter()
    done = False
    try:
        yield
        done = True
    finally:
        cpu, peak = _usage()
        cost = Cost(
            inputs=inputs,
            seconds=round(before.seconds + time.perf_counter() - started, 3),
            cpu_seconds=round(before.cpu_seconds + cpu, 3),
            peak_bytes=max(before.peak_bytes, peak),
            peak_gpu_bytes=max(before.peak_gpu_bytes, _gpu()[1]),
            machine=machine(),
            runs=before.runs + 1,
            done=done,
        )
        try:
            atomic_text(cost_file(root, title), json.dumps(asdict(cost)))
        except OSError as error:
            print(f"{title}: what it cost could not be written to {FOLDER}: {error}", file=sys.stderr)
