"""The sandbox back ends: bubblewrap, sandlock and, only when named explicitly, none. Each builds the command of the server."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from stages.sandbox.settings import SandboxSettings

NOBODY = "65534"
VARIABLES = {
    "HOME": "/scratch",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "PYTHONIOENCODING": "utf-8:backslashreplace",
}
"""A program's environment variables; it has no others."""

GUEST_MODULES = ("protocol", "step_counter", "program", "test_runner", "syscalls", "server")
"""Modules of stages/sandbox/guest, in import order."""
LOAD = """
import json, sys, types
for name, text in json.loads(sys.argv[1]):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
"""
"""Code with which a bare interpreter creates these modules."""
START = f"{LOAD}module.serve(json.loads(sys.argv[2]))"


def interpreter() -> Path:
    """The Python that runs programs: the base interpreter of the current virtual environment."""
    return Path(sys._base_executable).resolve()  # type: ignore[attr-defined]


@cache
def server_command() -> list[str]:
    """Python with the server's modules and only the standard library (`-S`, `-P`); callers append the server's options."""
    return [str(interpreter()), "-s", "-S", "-P", "-B", "-c", START, guest_sources()]


def guest_sources() -> str:
    """Names and source of the modules in GUEST_MODULES, as JSON for LOAD."""
    folder = Path(__file__).with_name("guest")
    return json.dumps(
        [(f"stages.sandbox.guest.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in GUEST_MODULES]
    )


class Backend:
    """One way to isolate programs. `warm`: one server runs many programs, since whatever they leave behind can be killed."""

    name: ClassVar[str]
    isolates: ClassVar[bool] = True
    warm: ClassVar[bool] = False

    @abstractmethod
    def missing(self) -> str | None:
        """Why it can't be used on this machine and what to do about it; None if nothing obvious is missing."""

    @abstractmethod
    def command(self, settings: SandboxSettings, scratch: Path | None) -> list[str]:
        """The command that starts the server; its standard input is the control socket. `scratch`: an empty folder, or None if
        `warm`."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Name and version."""

    def server_options(self, settings: SandboxSettings, scratch: str) -> str:
        """The server's options, as JSON. `filtered`: some system calls are denied. A back end that does not isolate skips the
        filter, so that it also works on machines without one."""
        limits = settings.model_dump(include={"cpu_seconds", "memory_mb", "file_mb", "processes"})
        return json.dumps({**limits, "scratch": scratch, "count_processes": self.warm, "filtered": self.isolates})


class Bubblewrap(Backend):
    """Separate namespaces (user, mount, pid, network, ipc, uts, cgroup) around one server, which is process 1 inside them and
    cannot be signalled by its forks.

    Root privileges are dropped first, because the limit on processes does not apply to root. If only root can reach the
    interpreter, an outer bubblewrap mounts it where everyone can read it.
    """

    name = "bubblewrap"
    warm = True

    def missing(self) -> str | None:
        if sys.platform != "linux":
            return "it runs on Linux only"
        if shutil.which("bwrap") is None:
            return "the program bwrap is missing: apt-get install bubblewrap (or dnf, pacman, apk)"
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            return "running as root requires the program setpriv: apt-get install util-linux"
        return None

    @property
    def title(self) -> str:
        return (
            subprocess.run(["bwrap", "--version"], capture_output=True, text=True, errors="replace", check=False).stdout.strip()
            or self.name
        )

    def command(self, settings: SandboxSettings, scratch: Path | None) -> list[str]:
        wrap = [
            "bwrap",
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--as-pid-1",
            "--die-with-parent",
            "--new-session",
        ]
        wrap += ["--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox", "--clearenv"]
        for name, value in VARIABLES.items():
            wrap += ["--setenv", name, value]
        wrap += self._system()
        wrap += [
            "--size",
            str(settings.scratch_mb << 20),
            "--tmpfs",
            "/scratch",
            "--chdir",
            "/scratch",
            "--remount-ro",
            "/",
            "--",
        ]
        return [*self._as_nobody(), *wrap, *server_command(), self.server_options(settings, "/scratch")]

    def _system(self) -> list[str]:
        """The system's libraries, Python and three devices, all read-only."""
        options = ["--ro-bind", "/usr", "/usr"]
        for path in (Path("/lib"), Path("/lib64"), Path("/bin")):
            if path.is_symlink():
                options += ["--symlink", str(path.readlink()), str(path)]
            elif path.exists():
                options += ["--ro-bind", str(path), str(path)]
        prefix = Path(sys.base_prefix).resolve()
        if not prefix.is_relative_to("/usr"):
            options += ["--ro-bind", str(prefix), str(prefix)]
        options += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
        for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
            options += ["--dev-bind", device, device]
        return options

    def _as_nobody(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
        drop += ["--inh-caps=-all", "--bounding-set=-all"]
        prefix = Path(sys.base_prefix).resolve()
        closed = [path for path in reversed(prefix.parents) if not path.stat().st_mode & stat.S_IXOTH]
        if not closed:
            return drop
        # Recreate the path to the interpreter with folders that anyone may enter, from the first one that only root can.
        outer = ["bwrap", "--die-with-parent", "--dev-bind", "/", "/", "--tmpfs", str(closed[0])]
        for path in reversed(prefix.parents):
            if path.is_relative_to(closed[0]) and path != closed[0]:
                outer += ["--perms", "0755", "--dir", str(path)]
        return [*outer, "--ro-bind", str(prefix), str(prefix), "--", *drop]


class Sandlock(Backend):
    """Landlock and seccomp, without namespaces; one server per program, since leftover processes end only with the sandbox."""

    name = "sandlock"

    def missing(self) -> str | None:
        if importlib.util.find_spec("sandlock") is None:
            return "the package sandlock is missing: pip install 'bellwether[sandlock]' (Linux 6.7 or newer)"
        import sandlock

        found, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if found < needed:
            return f"the kernel supports Landlock ABI {found}; version {needed} or newer is required"
        return None

    @property
    def title(self) -> str:
        return f"sandlock {version('sandlock')}"

    def command(self, settings: SandboxSettings, scratch: Path | None) -> list[str]:
        folder = str(scratch)
        readable = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", str(Path(sys.base_prefix).resolve())]
        options: dict[str, Any] = {
            "fs_readable": [path for path in readable if Path(path).exists()] + ["/dev/zero", "/dev/urandom"],
            "fs_writable": [folder, "/dev/null"],
            "max_memory": f"{settings.memory_mb * settings.processes + 128}M",
            # Two more, for the server and the tests.
            "max_processes": settings.processes + 2,
            "clean_env": True,
            "env": {**VARIABLES, "HOME": folder},
            "no_coredump": True,
            "cwd": folder,
        }
        command = [*server_command(), self.server_options(settings, folder)]
        return [sys.executable, "-m", "stages.sandbox.sandlock_runner", json.dumps({"options": options, "command": command})]


class UnsafeSubprocess(Backend):
    """An ordinary process with resource limits only: for machines without a sandbox, and trusted programs."""

    name = "unsafe_subprocess"
    isolates = False

    def missing(self) -> str | None:
        return None

    @property
    def title(self) -> str:
        return "an ordinary process"

    def command(self, settings: SandboxSettings, scratch: Path | None) -> list[str]:
        variables = {**VARIABLES, "HOME": str(scratch)}
        assigned = [f"{name}={value}" for name, value in variables.items()]
        return ["env", "-i", *assigned, *server_command(), self.server_options(settings, str(scratch))]


BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (Bubblewrap(), Sandlock(), UnsafeSubprocess())}
SAFE: Sequence[str] = ("bubblewrap", "sandlock")
"""What `auto` tries, in this order."""
