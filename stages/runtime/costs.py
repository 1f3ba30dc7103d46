"""Cost of running a stage on this machine: wall-clock time, CPU time and peak memory.

Written to `.bellwether/costs`, outside DVC's outputs, which must not depend on timing. A resumed run counts as one run.
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
    """`inputs`: the stage's inputs (see `lineage.identity`); `runs`: number of starts until it finished."""

    inputs: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """User and system time of the stage and its finished worker processes."""
    peak_bytes: int = 0
    """Largest resident memory of any of its processes."""
    peak_gpu_bytes: int = 0
    """Peak memory of tensors on the GPU."""
    machine: str = ""
    runs: int = 0
    done: bool = False


def cost_file(root: Path, title: str) -> Path:
    return root / FOLDER / f"{title}.json"


def read_cost(root: Path, title: str) -> Cost | None:
    """Cost of the last run of stage `title` (`rl@search`) in checkout `root`; None if there is no readable one."""
    try:
        return Cost(**json.loads(cost_file(root, title).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _usage() -> tuple[float, int]:
    """(CPU seconds, peak bytes) of this process and its finished children."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    unit = 1 if sys.platform == "darwin" else 1024
    return sum(use.ru_utime + use.ru_stime for use in found), max(use.ru_maxrss for use in found) * unit


def _gpu() -> tuple[str, int]:
    """(name, peak bytes) of the GPU that this process used; ("", 0) if none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "", 0
    return torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()


def machine() -> str:
    """The processor, the number of cores available to this process, and the GPU if one was used."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ", ".join(filter(None, (named[1] if named else platform.machine(), f"{cores} cores", _gpu()[0])))


@contextmanager
def measured(root: Path, title: str, inputs: str) -> Iterator[None]:
    """Measure the block. If the cost can't be written (e.g. a full disk), the stage still succeeds."""
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
            print(f"{title}: cannot write its cost to {FOLDER}: {error}", file=sys.stderr)
