"""Cost of running a stage on this machine: wall-clock time, CPU time, peak memory, and where the time went.

Written to `.bellwether/costs`, outside DVC's outputs, which must not depend on timing. A resumed run counts as one run.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from stages.runtime import spans
from stages.runtime.cores import available_cores, processor
from stages.runtime.files import atomic_text
from stages.runtime.lineage import TRANSFER, identity, input_hashes
from stages.runtime.yaml_files import read_yaml

FOLDER = Path(".bellwether") / "costs"
SAMPLE_EVERY_S = 2.0
SAMPLE_SHARE = 0.005
"""Memory is sampled at most this often, and for at most this share of the time."""


@dataclass(frozen=True)
class Cost:
    """`inputs`: the stage's inputs (see `lineage.identity`); `runs`: number of starts until it finished."""

    inputs: str
    seconds: float = 0.0
    """From the start of the process, without the time for which it was paused or waited for another stage's GPU."""
    cpu_seconds: float = 0.0
    """User and system time of the stage and of the processes it started."""
    peak_bytes: int = 0
    """Largest resident memory of any of its processes."""
    peak_tree_bytes: int = 0
    """Largest memory of all its processes together, sampled; what they share counts once."""
    peak_gpu_bytes: int = 0
    """Peak memory of tensors on the GPU."""
    machine: str = ""
    cores: int = 0
    """Available to the stage."""
    runs: int = 0
    done: bool = False
    spans: dict[str, float] = field(default_factory=dict)
    """Span -> seconds, summed over the processes that share the stage's work (stages.runtime.spans)."""
    beside: dict[str, float] = field(default_factory=dict)
    """Span -> seconds of other threads."""
    counts: dict[str, int] = field(default_factory=dict)
    """Work done, e.g. `sampled_tokens`."""


def cost_file(root: Path, title: str) -> Path:
    return root / FOLDER / f"{title}.json"


def read_cost(root: Path, title: str) -> Cost | None:
    """Cost of the last run of stage `title` (`rl@search`) in checkout `root`; None if there is no readable one."""
    try:
        return Cost(**json.loads(cost_file(root, title).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def current_costs(root: Path, domains: Sequence[str], transfer: Sequence[str] = ()) -> dict[str, Cost | None]:
    """Stage (`rl@search`) -> cost of its run on the current inputs on this machine; None if there was none, as where DVC restored
    its outputs. transfer: the domains of the stage of that name."""
    found: dict[str, Cost | None] = {}
    for name, entry in read_yaml(root / "dvc.yaml")["stages"].items():
        cells = transfer if name == TRANSFER else domains
        for domain in cells if "matrix" in entry else [None]:
            title = f"{name}@{domain}" if domain else name
            cost = read_cost(root, title)
            current = cost and cost.done and cost.inputs == identity(input_hashes(root, name, domain))
            found[title] = cost if current else None
    return found


def _processes() -> list[psutil.Process]:
    """This process and all that it started, directly or not."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _cpu_seconds() -> float:
    """User and system time of this process and of all that it started, whether finished or not."""
    total = 0.0
    for process in _processes():
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class _Memory:
    """Samples the memory of the process tree; a call returns in how many seconds to call it again."""

    def __init__(self) -> None:
        self.peak = 0

    def __call__(self) -> float:
        started, total = time.perf_counter(), 0
        for process in _processes():
            try:
                used = process.memory_full_info()
            except psutil.Error:
                continue
            total += getattr(used, "pss", used.uss)
        self.peak = max(self.peak, total)
        return max(SAMPLE_EVERY_S, (time.perf_counter() - started) / SAMPLE_SHARE)


def _largest_process() -> int:
    """Peak bytes of this process or of a finished child, whichever is more."""
    found = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(found) * (1 if sys.platform == "darwin" else 1024)


def _gpu() -> tuple[str, int]:
    """(name, peak bytes) of the GPU that this process used; ("", 0) if none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "", 0
    return torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()


def machine() -> str:
    """The processor, the number of cores available to this process, and the GPU if one was used."""
    return ", ".join(filter(None, (processor() or platform.machine(), f"{available_cores()} cores", _gpu()[0])))


def uptime() -> float:
    """Seconds since this process started."""
    return max(0.0, time.time() - psutil.Process(os.getpid()).create_time())


def _sum(before: dict, new: dict, digits: int) -> dict:
    return {name: round(before.get(name, 0) + new.get(name, 0), digits) for name in sorted({**before, **new})}


@contextmanager
def measured(root: Path, title: str, inputs: str, started: float = 0.0) -> Iterator[None]:
    """Measure the block, which begins `started` seconds after the process. If the cost can't be written (e.g. a full disk), the
    stage still succeeds."""
    before = read_cost(root, title)
    if before is None or before.done or before.inputs != inputs:
        before = Cost(inputs)
    memory, begun = _Memory(), time.perf_counter()
    spans.restart(started, memory)
    done = False
    try:
        yield
        done = True
    finally:
        memory()
        found, largest = spans.totals(), _largest_process()
        paused = found.seconds.pop(spans.PAUSED, 0.0)
        cost = Cost(
            inputs=inputs,
            seconds=round(before.seconds + started + time.perf_counter() - begun - paused, 3),
            cpu_seconds=round(before.cpu_seconds + _cpu_seconds(), 3),
            peak_bytes=max(before.peak_bytes, largest),
            peak_tree_bytes=max(before.peak_tree_bytes, largest, memory.peak),
            peak_gpu_bytes=max(before.peak_gpu_bytes, _gpu()[1]),
            machine=machine(),
            cores=available_cores(),
            runs=before.runs + 1,
            done=done,
            spans=_sum(before.spans, found.seconds, 3),
            beside=_sum(before.beside, found.beside, 3),
            counts=_sum(before.counts, found.counts, 0),
        )
        try:
            atomic_text(cost_file(root, title), json.dumps(asdict(cost)))
        except OSError as error:
            print(f"{title}: cannot write its cost to {FOLDER}: {error}", file=sys.stderr)
