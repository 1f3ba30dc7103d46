"""The cores of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def concurrent_runs(device: str) -> int:
    """One single-threaded run per core, which is faster than one run on all cores; one run on an accelerator."""
    return available_cores() if device == "cpu" else 1


def processor(field: str = "model name") -> str:
    """What Linux says of the first processor in `field` ("vendor_id" is its maker); "" elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")
