"""Divides a stage's tasks over processes and machines.

A shard computes some of the stage's chunks and leaves them as checkpoints. The stage itself, started when the shards are done,
resumes from these and writes its outputs: the same bytes as without shards, since chunks are independent. All processes need the
same checkout, on one machine or on a shared file system.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stages.runtime.command import OUTPUT_CLOSED, OutputClosed
from stages.runtime.process import wait_supervised
from stages.runtime.resources import ShardParams
from stages.runtime.validation import ParamsError

BAD_PARAMETERS = 2
"""Exit code of a stage that cannot succeed on a retry (stages/runtime/stage.py)."""
BESIDE = "LOCAL_WORLD_SIZE"
"""Environment variable (torchrun's): number of this stage's processes on this machine, which share its threads."""


@dataclass(frozen=True)
class Shard:
    """Shard `index` of `count`, from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From "2/4". Raises ParamsError for anything else."""
        index, _, count = text.partition("/")
        if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
            raise ParamsError(f"--shard {text}: write 2/4 for the second of four, from 1/4 to 4/4")
        return cls(int(index), int(count))

    def owns(self, number: int) -> bool:
        """Whether chunk `number`, from 0, is this shard's."""
        return number % self.count == self.index - 1


def _processes(command: list[str], root: Path, count: int) -> int:
    """Run all shards as processes on this machine; returns their largest exit code: as in a shell, 128 + signal for one that
    a signal ended."""
    environment = {**os.environ, BESIDE: str(count)}
    running: list[subprocess.Popen] = []
    try:
        for index in range(1, count + 1):
            running.append(subprocess.Popen([*command, "--shard", f"{index}/{count}"], cwd=root, env=environment))
        codes = [process.wait() for process in running]
        return max(code if code >= 0 else 128 - code for code in codes)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()


def run_shards(root: Path, stage: str, domain: str | None, params: ShardParams) -> None:
    """Run all shards of a stage. If one fails, raises ValueError for invalid parameters, else ChildProcessError;
    finished chunks are kept."""
    of_domain = ["--domain", domain] if domain else []
    print(f"{stage}: {params.count} shards, runner {params.runner}", flush=True)
    if params.runner == "processes":
        code = _processes([sys.executable, "-m", f"stages.{stage}", *of_domain], root, params.count)
    else:
        address = ["--address", params.address] if params.address else []
        flow = [sys.executable, "-m", "flows.shards", stage, *of_domain, "--shards", str(params.count), "--runner", params.runner]
        code = wait_supervised([*flow, *address], cwd=root)
    if code == OUTPUT_CLOSED:
        raise OutputClosed(code)
    if code:
        raise (ValueError if code == BAD_PARAMETERS else ChildProcessError)(
            f"a shard of {stage} failed (exit code {code}); see its message above. Finished chunks are kept: run "
            "the stage again, or set resources.shards.count to 1"
        )
