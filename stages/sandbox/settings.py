"""What can be set for the sandbox (params.yaml, per_domain.code.environment.sandbox)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stages.runtime.validation import Checked

Backend = Literal["auto", "bubblewrap", "sandlock", "unsafe_subprocess"]


class SandboxSettings(Checked):
    """Where programs run, and how much of the machine each may have."""

    backend: Backend = "auto"
    """auto: bubblewrap, or else sandlock, or else an error. unsafe_subprocess: an ordinary process of this user, with nothing
    between the program and the files, the network and the other processes of this machine; never taken unless named here."""
    steps: Annotated[int, Field(ge=1)] | None = 1_000_000
    """Instructions (Python's bytecode, of the program's own functions) that a call, and loading the program, may take: what ends
    a loop without end on every machine alike, and sooner than time. null: no such limit."""
    cpu_seconds: Annotated[int, Field(ge=1, le=3600)] = 2
    """Of each process."""
    wall_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 10.0
    """For loading the program and all its tests."""
    memory_mb: Annotated[int, Field(ge=64)] = 256
    """Address space of each process."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 4
    """At one time, threads too; the program itself is one."""
    output_kb: Annotated[int, Field(ge=1)] = 64
    """Printed, both streams together."""
    file_mb: Annotated[int, Field(ge=0)] = 1
    """Of each file."""
    scratch_mb: Annotated[int, Field(ge=1)] = 16
    """The private scratch folder, all files together (sandlock limits single files alone)."""
