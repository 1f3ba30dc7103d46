"""What can be set for the sandbox (params.yaml, per_domain.code.environment.sandbox)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stages.runtime.validation import Checked

Backend = Literal["auto", "bubblewrap", "sandlock", "unsafe_subprocess"]


class SandboxSettings(Checked):
    """Where programs run, and the limits on each."""

    backend: Backend = "auto"
    """auto: bubblewrap if available, else sandlock, else an error. unsafe_subprocess: an ordinary process of this user with full
    access to this machine's files, network and other processes; used only if named here."""
    steps: Annotated[int, Field(ge=1)] | None = 1_000_000
    """Most bytecode instructions, in the program's own functions, that one call or loading the program may execute: stops endless
    loops at the same point on every machine, and sooner than the time limit. null: no limit."""
    cpu_seconds: Annotated[int, Field(ge=1, le=3600)] = 2
    """CPU time of each process."""
    wall_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 10.0
    """Wall-clock time for loading the program and running all its tests."""
    memory_mb: Annotated[int, Field(ge=64)] = 256
    """Address space of each process."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 4
    """Most simultaneous processes and threads, the program itself included."""
    output_kb: Annotated[int, Field(ge=1)] = 64
    """Most output, stdout and stderr together."""
    file_mb: Annotated[int, Field(ge=0)] = 1
    """Size of each file."""
    scratch_mb: Annotated[int, Field(ge=1)] = 16
    """Size of all files in the private scratch folder (sandlock limits only each file)."""
