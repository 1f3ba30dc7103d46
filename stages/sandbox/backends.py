"""Who does the isolating: bubblewrap, sandlock, or, if it is asked for by name, nobody. Each says how the server is started."""

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
"""All of a program's environment."""

GUEST_MODULES = ("protocol", "step_counter", "program", "test_runner", "syscalls", "server")
"""Modules of stages/sandbox/guest, each before those that import it."""
LOAD = """
import json, sys, types
for name, text in json.loads(sys.argv[1]):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
"""
"""What a bare interpreter makes these modules of."""
START = f"{LOAD}module.serve(json.loads(sys.argv[2]))"


def interpreter() -> Path:
    """The Python that runs programs: the one that runs this, outside its virtual environment."""
    return Path(sys._base_executable).resolve()  # type: ignore[attr-defined]


@cache
def server_command() -> list[str]:
    """Python with the server's modules, and no packages but its own (`-S`, `-P`); what the server is told comes behind."""
    return [str(interpreter()), "-s", "-S", "-P", "-B", "-c", START, texts()]


def texts() -> str:
    """Names and texts of the modules in GUEST_MODULES, for LOAD."""
    folder = Path(__file__).with_name("guest")
    return json.dumps(
        [(f"stages.sandbox.guest.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in GUEST_MODULES]
    )


class Backend:
    """One way to isolate. `warm`: a server outlives its programs, since all they leave behind can be found and ended."""

    name: ClassVar[str]
    isolates: ClassVar[bool] = True
    warm: ClassVar[bool] = False

    @abstractmethod
    def missing(self) -> str | None:
        """Why it can't be used here and what to do about it; None if nothing is known against it."""

    @abstractmethod
    def command(self, settings: SandboxSettings, scratch: Path | None) -> list[str]:
        """What starts the server, whose control socket is its standard input. `scratch`: an empty folder, unless `warm`."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Name and version."""

    def inner(self, settings: SandboxSettings, scratch: str) -> str:
        """What the server is told. `filtered`: programs are denied some system calls. A back end that promises nothing does
        without: it is there for machines that have no such filter, too."""
        told = settings.model_dump(include={"cpu_seconds", "memory_mb", "file_mb", "processes"})
        return json.dumps({**told, "scratch": scratch, "count_processes": self.warm, "filtered": self.isolates})


class Bubblewrap(Backend):
    """Namespaces of its own (user, mount, pid, network, ipc, uts, cgroup) around one server, which is process 1 in there and
    cannot be signalled by what it forks.

    Root is dropped first, for whom the limit on processes would not count; an interpreter that only root could reach is put
    where it can be read by an outer bubblewrap.
    """

    name = "bubblewrap"
    warm = True

    def missing(self) -> str | None:
        if sys.platform != "linux":
            return "it is there for Linux alone"
        if shutil.which("bwrap") is None:
            return "the program bwrap is missing: apt-get install bubblewrap (or dnf, pacman, apk)"
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            return "to run as root it needs the program setpriv: apt-get install util-linux"
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
        return [*self._as_nobody(), *wrap, *server_command(), self.inner(settings, "/scratch")]

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
        # The path to the interpreter, as folders that anyone may pass, over the first one that only root can.
        outer = ["bwrap", "--die-with-parent", "--dev-bind", "/", "/", "--tmpfs", str(closed[0])]
        for path in reversed(prefix.parents):
            if path.is_relative_to(closed[0]) and path != closed[0]:
                outer += ["--perms", "0755", "--dir", str(path)]
        return [*outer, "--ro-bind", str(prefix), str(prefix), "--", *drop]


class Sandlock(Backend):
    """Landlock and seccomp, without namespaces; one server for each program, since what a program leaves behind ends with the
    whole."""

    name = "sandlock"

    def missing(self) -> str | None:
        if importlib.util.find_spec("sandlock") is None:
            return "the package sandlock is missing: pip install 'bellwether[sandlock]' (Linux 6.7 or newer)"
        import sandlock

        found, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if found < needed:
            return f"the kernel offers Landlock ABI {found}, and it needs {needed}"
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
            # The server and the tests are two.
            "max_processes": settings.processes + 2,
            "clean_env": True,
            "env": {**VARIABLES, "HOME": folder},
            "no_coredump": True,
            "cwd": folder,
        }
        command = [*server_command(), self.inner(settings, folder)]
        return [sys.executable, "-m", "stages.sandbox.sandlock_runner", json.dumps({"options": options, "command": command})]


class UnsafeSubprocess(Backend):
    """Nothing but limits: for machines without a sandbox, and programs that are trusted."""

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
        return ["env", "-i", *assigned, *server_command(), self.inner(settings, str(scratch))]


BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (Bubblewrap(), Sandlock(), UnsafeSubprocess())}
SAFE: Sequence[str] = ("bubblewrap", "sandlock")
"""What `auto` tries, in this order."""
