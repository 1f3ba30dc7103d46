"""The process beside the stages of a checkout: sends their events, samples CPU, memory and GPU, and marks a run KILLED if its
stage dies. One serves all stages that run at a time or soon after one another, since loading MLflow takes seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from stages.runtime.files import locked
from stages.tracking.sender import Sender
from stages.tracking.server import Server
from stages.tracking.spool import Spool, follower_lock, server_key, spools
from stages.tracking.sweep import replay, sweep, writer_alive

SEND_EVERY_S = 2.0
SAMPLE_EVERY_S = 5.0
RETRY_AT_MOST_S = 30.0
LOOK_EVERY_S = 0.2
"""Between looks at the stages: whether a new one runs, and whether one has ended its run or exited."""
LINGER_S = 60.0
"""How long a follower keeps sending after a stage has exited."""
LINGER_UNREACHABLE_S = 5.0
"""The same while the server is unreachable."""
IDLE_S = 10.0
"""How long it waits for another stage after the last."""
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


def follow(root: Path) -> int:
    """Send the runs of a checkout's stages as long as there are any. Exit code: 0, also if another follower does, and 1 if some
    could not be sent (their spool files stay)."""
    # A signal to the process group reaches this process too, but the stages' last events must still be sent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    with locked(follower_lock(root), wait=False) as free:
        if not free:
            return 0
        follower = Follower(root)
        signal.signal(signal.SIGTERM, lambda signum, frame: follower.leave())
        return follower.run()


class Followed:
    """A stage's run, whose spool file this process holds locked."""

    def __init__(self, root: Path, spool: Spool, header: Mapping[str, Any]) -> None:
        self.spool, self.header = spool, header
        self.sampler = Sampler(header["pid"], root)
        self.sender: Sender | None = None
        self.failures = 0
        self.exited_at: float | None = None
        self.next_send = self.next_sample = 0.0
        self.size = 0

    @property
    def given_up(self) -> bool:
        linger = LINGER_UNREACHABLE_S if self.failures else LINGER_S
        return self.exited_at is not None and time.monotonic() - self.exited_at > linger

    def sample(self) -> None:
        """Sample the system's metrics when it is time."""
        if self.exited_at is not None or time.monotonic() < self.next_sample:
            return
        self.next_sample = time.monotonic() + SAMPLE_EVERY_S
        try:
            self.sampler.append_to(self.spool)
        except (OSError, self.sampler.psutil.Error) as error:
            print(f"no sample: {error}", flush=True)

    def look(self) -> None:
        """Notice the end of the run, or of its process, and send at once then."""
        if self.exited_at is not None:
            return
        size = self.spool.path.stat().st_size if self.spool.path.exists() else 0
        grown, self.size = size != self.size, size
        ended = grown and self.spool.ended()
        if not ended and writer_alive(self.header):
            return
        self.exited_at, self.next_send = time.monotonic(), 0.0
        if not ended and self.spool.path.exists() and not self.spool.ended():
            self.spool.end_killed()

    def send(self, server: Server) -> bool:
        """Send pending events; whether the run has ended and all is sent. Raises what MLflow raises."""
        if self.sender is None:
            self.sender = Sender(server, self.spool)
        over = self.sender.send()
        self.failures = 0
        return over

    def failed(self, error: Exception) -> None:
        """Note that the server did not take the events: the next attempt is later, with exponential backoff."""
        self.failures += 1
        print(f"{time.strftime('%H:%M:%S')} {self.spool.path.name}: {type(error).__name__}: {error}", flush=True)
        with suppress(OSError):  # full disk: the stage does not learn of the error
            self.spool.save_error(f"{type(error).__name__}: {str(error)[:300]}")


class Follower:
    """Follows the runs of all stages of a checkout that go to this process's server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[Path, tuple[Followed, ExitStack]] = {}
        self.server: Server | None = None
        self.swept = self.leaving = False
        self.gave_up = self.failures = 0
        self.next_clean_up = 0.0

    def leave(self) -> None:
        """Do not wait for further stages."""
        self.leaving = True

    def run(self) -> int:
        """Exit code as of `follow`."""
        idle_since = time.monotonic()
        while True:
            self.adopt()
            if not self.runs and spools(self.root):  # of stages that were over before this process looked
                self.clean_up()
            for path, (run, held) in list(self.runs.items()):
                if self.serve(run):
                    held.close()
                    del self.runs[path]
                    idle_since = time.monotonic()
            if not self.runs and (self.leaving or time.monotonic() - idle_since > IDLE_S):
                return int(bool(self.gave_up or self.failures))
            time.sleep(LOOK_EVERY_S)

    def adopt(self) -> None:
        """Take up the runs of stages that began since the last look."""
        for spool in spools(self.root):
            if spool.path in self.runs:
                continue
            with ExitStack() as stack:
                if not stack.enter_context(locked(spool.path.with_suffix(".lock"), wait=False)) or not spool.path.exists():
                    continue
                header = spool.header()
                if header is None or header.get("server", server_key()) != server_key():
                    continue
                if writer_alive(header):
                    self.runs[spool.path] = Followed(self.root, spool, header), stack.pop_all()

    def connection(self) -> Server:
        """The server, connected to when it is first needed. Raises what MLflow raises if it is unreachable."""
        if self.server is None:
            self.server = Server(self.root)
        return self.server

    def serve(self, run: Followed) -> bool:
        """Do what is due for a run; whether there is nothing left to do."""
        try:
            run.look()
            run.sample()
            if time.monotonic() < run.next_send:
                return run.given_up
            over = run.send(self.connection())
            self._clean_up_others(self.connection(), over)
            if over:
                return True
        except Exception as error:  # of one run, which must not end the others'
            run.failed(error)
        run.next_send = time.monotonic() + min(SEND_EVERY_S * 2**run.failures, RETRY_AT_MOST_S)
        self.gave_up += run.given_up
        return run.given_up

    def clean_up(self) -> None:
        """Send what no stage writes any more, when it is time."""
        if time.monotonic() < self.next_clean_up:
            return
        try:
            self._clean_up_others(self.connection(), over=True)
            self.failures = 0
        except Exception as error:
            self.failures += 1
            print(f"{time.strftime('%H:%M:%S')} {type(error).__name__}: {error}", flush=True)
        self.next_clean_up = time.monotonic() + min(SEND_EVERY_S * 2**self.failures, RETRY_AT_MOST_S)

    def _clean_up_others(self, server: Server, over: bool) -> None:
        """Send the leftovers of earlier stages and, once, end runs of dead processes. A failure is left to the next follower."""
        try:
            replay(self.root, server, at_most=None if over else OTHERS_AT_MOST)
            if not self.swept:
                self.swept = True
                sweep(server)
        except Exception as error:
            print(f"{time.strftime('%H:%M:%S')} others: {type(error).__name__}: {error}", flush=True)
