"""The process beside a stage: sends its events, samples CPU, memory and GPU, and marks the run KILLED if the stage dies."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.runtime.files import locked
from stages.tracking.sender import Sender
from stages.tracking.server import Server
from stages.tracking.spool import FOLDER, Spool
from stages.tracking.sweep import replay, sweep

SEND_EVERY_S = 2.0
SAMPLE_EVERY_S = 5.0
RETRY_AT_MOST_S = 30.0
LINGER_S = 60.0
"""How long a follower keeps sending after its stage has exited."""
LINGER_UNREACHABLE_S = 5.0
"""The same while the server is unreachable."""
OTHERS_AT_MOST = 20
"""Leftover runs of other stages sent between two sends of the own one."""


class Sampler:
    """System metrics of a process and its children, under MLflow's names for them."""

    def __init__(self, pid: int, folder: Path) -> None:
        import psutil

        self.psutil, self.pid, self.folder = psutil, pid, folder
        self.seen: dict[int, Any] = {}
        self.step = 0
        self.gpus = self._gpus()

    def _gpus(self) -> list[Any]:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:
            # A missing package, driver or GPU each raise another exception; all mean no GPU to sample.
            print(f"no GPU metrics: {error}", flush=True)
            return []
        self.pynvml = pynvml
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def sample(self) -> dict[str, float]:
        """CPU (% of one core), memory and free disk (MB); per GPU utilisation (%), memory (MB), power (W).

        Raises psutil.NoSuchProcess if the process has exited.
        """
        cpu = memory = 0.0
        stage = self.psutil.Process(self.pid)
        for process in [stage, *stage.children(recursive=True)]:
            if process.pid == os.getpid():
                continue
            process = self.seen.setdefault(process.pid, process)
            try:
                cpu += process.cpu_percent()
                memory += process.memory_info().rss / 1e6
            except self.psutil.NoSuchProcess:
                del self.seen[process.pid]
        values = {
            "system/cpu_utilization_percentage": cpu,
            "system/system_memory_usage_megabytes": memory,
            "system/disk_available_megabytes": self.psutil.disk_usage(str(self.folder)).free / 1e6,
        }
        for index, gpu in enumerate(self.gpus):
            values[f"system/gpu_{index}_utilization_percentage"] = float(self.pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
            values[f"system/gpu_{index}_memory_usage_megabytes"] = self.pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e6
            values[f"system/gpu_{index}_power_usage_watts"] = self.pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
        return values

    def append_to(self, spool: Spool) -> None:
        for name, value in self.sample().items():
            spool.append({"kind": "metric", "name": name, "value": value, "step": self.step})
        self.step += 1


def follow(path: Path) -> int:
    """Send `path` until its run ends. Standard input is a pipe from the stage, which closes however the stage exits."""
    # A signal to the process group reaches this process too, but the stage's last events must still be sent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(10)
    root = path.parents[len(FOLDER.parts)]
    spool = Spool(path)
    with locked(path.with_suffix(".lock"), wait=True):
        if not path.exists():
            # Another stage's follower may have sent all of a short stage's events while this one started.
            spool.remove()
            return 0
        header = spool.header()
        # Not os.getppid(): it is another process's once the stage has exited.
        return Follower(root, spool, header["pid"] if header else 0).run()


class Follower:
    def __init__(self, root: Path, spool: Spool, parent: int) -> None:
        self.root, self.spool, self.parent = root, spool, parent
        self.sampler = Sampler(parent, root)
        self.sender: Sender | None = None
        self.failures = 0
        self.swept = False
        self.exited_at: float | None = None
        self.next_send = self.next_sample = 0.0

    def run(self) -> int:
        """Exit code: 0 if all was sent, 1 if it gave up (the spool file stays)."""
        while self.exited_at is None or time.monotonic() - self.exited_at <= (
            LINGER_UNREACHABLE_S if self.failures else LINGER_S
        ):
            if self.exited_at is None and time.monotonic() >= self.next_sample:
                self._sample()
            if time.monotonic() >= self.next_send:
                if self._send():
                    return 0
                self.next_send = time.monotonic() + min(SEND_EVERY_S * 2**self.failures, RETRY_AT_MOST_S)
            self._wait()
        return 1

    def _sample(self) -> None:
        self.next_sample = time.monotonic() + SAMPLE_EVERY_S
        try:
            self.sampler.append_to(self.spool)
        except (OSError, self.sampler.psutil.Error) as error:
            print(f"no sample: {error}", flush=True)

    def _wait(self) -> None:
        """Sleep until the next send or sample; if the stage exits meanwhile, end its run and send at once."""
        if self.exited_at is not None:
            time.sleep(0.2)
            return
        pause = min(self.next_send, self.next_sample) - time.monotonic()
        # Workers forked by a killed stage may keep the pipe open, so the parent's PID is checked too.
        ready, _, _ = select.select([sys.stdin], [], [], min(max(pause, 0.0), 1.0))
        if ready or os.getppid() != self.parent:
            self.exited_at = time.monotonic()
            self.next_send = 0.0
            if not self.spool.ended():
                self.spool.end_killed()

    def _clean_up_others(self, server: Server, over: bool) -> None:
        """Send the leftovers of earlier stages and, once, end runs of dead processes. A failure is left to the next follower."""
        try:
            replay(self.root, server, at_most=None if over else OTHERS_AT_MOST)
            if not self.swept:
                self.swept = True
                sweep(server)
        except Exception as error:
            print(f"{time.strftime('%H:%M:%S')} others: {type(error).__name__}: {error}", flush=True)

    def _send(self) -> bool:
        """Send pending events; True when the run has ended and all is sent. Failures are retried with exponential backoff."""
        try:
            if self.sender is None:
                self.sender = Sender(Server(self.root), self.spool)
            over = self.sender.send()
            self.failures = 0
            self._clean_up_others(self.sender.server, over)
            return over
        except Exception as error:
            self.failures += 1
            print(f"{time.strftime('%H:%M:%S')} {self.spool.path.name}: {type(error).__name__}: {error}", flush=True)
            with suppress(OSError):  # full disk: the stage does not learn of the error
                self.spool.save_error(f"{type(error).__name__}: {str(error)[:300]}")
        return False
