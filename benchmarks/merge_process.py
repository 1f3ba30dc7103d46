"""One merge, measured within its process: `python -m benchmarks.merge_process ours|theirs|limit METHOD OUT BASE MODEL...`.

Prints a line of JSON: wall and CPU seconds of the merge, the process's peak resident memory (which counts pages of mapped
files), the peak of its anonymous memory during the merge (which does not), and bytes the disk read and the process wrote.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.merge import DENSITY, EPSILON


def status(name: str) -> int:
    """A size from /proc/self/status in bytes; 0 if unavailable."""
    path = Path("/proc/self/status")
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


class AnonymousMemory:
    """Peak of RssAnon in bytes, sampled every 10 ms by a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.peak = max(self.peak, status("RssAnon"))

    def __enter__(self) -> AnonymousMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.peak = max(self.peak, status("RssAnon"))


def disk_bytes() -> dict[str, int]:
    """Bytes read from and written to storage by this process so far; empty if unavailable."""
    path = Path("/proc/self/io")
    if not path.exists():
        return {}
    values = dict(line.split(": ") for line in path.read_text(encoding="ascii").splitlines())
    return {name: int(values[name]) for name in ("read_bytes", "write_bytes")}


def ours(method: str, out: Path, base: Path, models: list[Path]) -> Callable[[], object]:
    from stages.merging.registry import bind
    from stages.merging.streaming import merge_folders
    from stages.runtime.resources import available_cores

    given = {"density": DENSITY, "ram": {"eps": EPSILON, "scope": "global"}, "ties": {"scope": "tensor"}}
    params = bind(method, (1.0,) * len(models), given)
    workers = available_cores()
    return lambda: merge_folders(method, models, base, out, params, seed=0, out_dtype="float32", workers=workers)


def limit(method: str, out: Path, base: Path, models: list[Path]) -> Callable[[], object]:
    """What no merge can do without: reading all weights once, and writing as many as one model has; one thread."""
    buffer = memoryview(bytearray(1 << 18))  # stays in the second-level cache

    def run() -> None:
        out.mkdir()
        for folder in (base, *models):
            for path in folder.glob("*.safetensors"):
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
        for path in base.glob("*.safetensors"):
            with (out / path.name).open("wb", buffering=0) as file:
                left = path.stat().st_size
                while left:
                    left -= file.write(buffer[:left])

    return run


def theirs(method: str, out: Path, base: Path, models: list[Path]) -> Callable[[], object]:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    entries = []
    for model in models:
        parameters = {"weight": 1.0, "density": DENSITY} if method == "ties" else {}
        entries.append({"model": str(model), "parameters": parameters})
    values = {
        "merge_method": method,
        "base_model": str(base),
        "models": entries,
        "parameters": {"epsilon": EPSILON} if method == "ram" else {"normalize": True},
        "dtype": "float32",
        "out_dtype": "float32",
    }
    configuration = MergeConfiguration.model_validate(values)
    options = MergeOptions(quiet=True, write_model_card=False, copy_tokenizer=True, lazy_unpickle=True)
    return lambda: run_merge(configuration, str(out), options)


def main() -> int:
    who, method, out, base, *models = sys.argv[1:]
    merge = {"ours": ours, "theirs": theirs, "limit": limit}[who](
        method, Path(out), Path(base), [Path(model) for model in models]
    )
    before = disk_bytes()
    with AnonymousMemory() as memory:
        cpu, wall = time.process_time(), time.perf_counter()
        merge()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = disk_bytes()
    measured = {
        "wall_s": wall,
        "cpu_s": cpu,
        "peak_rss_bytes": status("VmHWM"),
        "peak_anonymous_bytes": memory.peak,
        **{name: value - before[name] for name, value in after.items()},
    }
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
