"""sandbox_programs: small programs with tests in the warm server, against one bubblewrap process per program; sandbox_start:
start-up of the server, against starting Python in bubblewrap.

Both sides run the same programs with the same isolation, and the scenario fails if their verdicts differ. Skipped if bubblewrap
does not work.
"""

from __future__ import annotations

import subprocess

from benchmarks.measure import Options, Result, Side, alternate
from benchmarks.startup import SkippedError
from stages.sandbox import Program, Sandbox, SandboxSettings, Tests
from stages.sandbox.backends import BACKENDS, server_command
from stages.sandbox.probe import fault

PROGRAMS = (
    ("sum(x for x in xs if x % 2 == 0)", True),
    ("sorted(xs)[-1]", False),
    ("total = 0\nfor x in xs:\n    if x % 2 == 0:\n        total += x\nreturn total", True),
    ("xs[9]", False),
    ("sum(xs", False),
)
"""Function bodies, and whether they pass TESTS."""
TESTS = ("assert f([1, 2, 4]) == 6", "assert f([]) == 0", "assert f([3, 8]) == 8")
SETTINGS = SandboxSettings(backend="bubblewrap", steps=None)
AGAINST = "a bubblewrap for each program"


def standalone(source: str) -> str:
    """A module that runs its tests."""
    body = "".join(f"    {line}\n" for line in (source if "return" in source else f"return {source}").splitlines())
    return f"def f(xs):\n{body}\n" + "\n".join(TESTS) + "\n"


def wrapped() -> list[str]:
    """The bubblewrap command of the server, with `python -c`."""
    command = BACKENDS["bubblewrap"].command(SETTINGS, None)
    own = server_command()
    return [*command[: command.index(own[-2]) - 1], "-c"]


def in_own_process(sources: list[str]) -> list[bool]:
    """Whether each passes, in its own bubblewrap process."""
    command = wrapped()
    return [
        subprocess.run([*command, standalone(source)], capture_output=True, check=False).returncode == 0 for source in sources
    ]


def in_server(sandbox: Sandbox, sources: list[str]) -> list[bool]:
    return [sandbox.run(Program(source, "f", ("xs",)), Tests(TESTS)).passed for source in sources]


def programs(options: Options) -> Result:
    sources = [PROGRAMS[number % len(PROGRAMS)][0] for number in range(options.size(500, 5))]
    expected = [PROGRAMS[number % len(PROGRAMS)][1] for number in range(len(sources))]
    sandbox = Sandbox(SETTINGS)

    def ours() -> float:
        if in_server(sandbox, sources) != expected:
            raise RuntimeError("wrong verdict by the server")
        return len(sources)

    def theirs() -> float:
        if in_own_process(sources) != expected:
            raise RuntimeError("wrong verdict by bubblewrap alone")
        return len(sources)

    samples = alternate(Side("warm server", ours), Side(AGAINST, theirs), options)
    sandbox.close()
    return Result("programs/s", AGAINST, "rate", *samples, notes={"programs": len(sources), "tests": len(TESTS)})


def start(options: Options) -> Result:
    def ours() -> float:
        sandbox = Sandbox(SETTINGS)
        sandbox.run(Program("pass"))
        sandbox.close()
        return 1.0

    def theirs() -> float:
        subprocess.run([*wrapped(), "pass"], check=True)
        return 1.0

    samples = alternate(Side("server and its first program", ours), Side("Python in bubblewrap", theirs), options)
    return Result("s", "Python in bubblewrap", "seconds", *samples)


def measure(options: Options) -> dict[str, Result]:
    if lacking := fault("bubblewrap"):
        raise SkippedError(f"bubblewrap: {lacking}")
    return {"sandbox_programs": programs(options), "sandbox_start": start(options)}
