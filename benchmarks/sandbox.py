"""sandbox_programs and sandbox_start: running small programs with their tests in the warm server, against a bubblewrap for each
of them; and what the server costs to start, against starting Python in bubblewrap once.

Both sides run the same programs with the same limits of namespaces and files, and the scenario fails if the two do not say the
same of each program. Skipped where bubblewrap does not work.
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
"""Programs of xs, and whether they pass."""
TESTS = ("assert f([1, 2, 4]) == 6", "assert f([]) == 0", "assert f([3, 8]) == 8")
SETTINGS = SandboxSettings(backend="bubblewrap", steps=None)
AGAINST = "a bubblewrap for each program"


def whole(source: str) -> str:
    """A module that runs the tests itself: what one writes without a server."""
    body = "".join(f"    {line}\n" for line in (source if "return" in source else f"return {source}").splitlines())
    return f"def f(xs):\n{body}\n" + "\n".join(TESTS) + "\n"


def wrapped() -> list[str]:
    """bubblewrap and Python, as the server is started, without what tells Python to be one."""
    command = BACKENDS["bubblewrap"].command(SETTINGS, None)
    own = server_command()
    return [*command[: command.index(own[-2]) - 1], "-c"]


def apart(sources: list[str]) -> list[bool]:
    """Whether each passes, in a bubblewrap of its own."""
    command = wrapped()
    return [subprocess.run([*command, whole(source)], capture_output=True, check=False).returncode == 0 for source in sources]


def in_server(sandbox: Sandbox, sources: list[str]) -> list[bool]:
    return [sandbox.run(Program(source, "f", ("xs",)), Tests(TESTS)).passed for source in sources]


def programs(options: Options) -> Result:
    sources = [PROGRAMS[number % len(PROGRAMS)][0] for number in range(options.size(500, 5))]
    expected = [PROGRAMS[number % len(PROGRAMS)][1] for number in range(len(sources))]
    sandbox = Sandbox(SETTINGS)

    def ours() -> float:
        if in_server(sandbox, sources) != expected:
            raise RuntimeError("the server says something else of a program than is true")
        return len(sources)

    def theirs() -> float:
        if apart(sources) != expected:
            raise RuntimeError("bubblewrap alone says something else of a program than is true")
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
