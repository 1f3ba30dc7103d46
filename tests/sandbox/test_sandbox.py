"""Outcomes of programs and their tests on every back end; choosing a back end and losing a server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stages.sandbox import Program, Sandbox, SandboxError, SandboxSettings, Tests, probe
from stages.sandbox.backends import BACKENDS, SAFE
from stages.sandbox.guest.protocol import decode, describe, encode
from stages.sandbox.server import LostError

pytestmark = pytest.mark.long(20)


def verdicts(sandbox: Sandbox, source: str, *tests: str, context: str = "") -> list[str]:
    outcome = sandbox.run(Program(source, "f", ("x",)), Tests(tests, context))
    assert outcome.status == "ok", outcome
    return [result.verdict for result in outcome.results]


def test_output_of_a_program(any_sandbox: Sandbox) -> None:
    outcome = any_sandbox.run(Program("import sys\nprint('out')\nprint('\\udc80', file=sys.stderr)"))
    assert outcome.status == "ok"
    assert sorted(outcome.output.split()) == ["\\udc80", "out"]


@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        ("def f(:", "compile_error", "SyntaxError: invalid syntax"),
        ("", "compile_error", "SyntaxError: there is no program"),
        ("x = '\0'", "compile_error", "source code string cannot contain null bytes"),
        ("(" * 10_000, "compile_error", "too many nested parentheses"),
        ("1 / 0", "error", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "error", "SystemExit: 0"),
        ("input()", "error", "EOFError: EOF when reading a line"),
        ("import numpy", "error", "ModuleNotFoundError: No module named 'numpy'"),
        ("def g():\n    return g()\ng()", "error", "RecursionError: maximum recursion depth exceeded"),
        ("while True: pass", "timeout", "more than 100000 steps"),
        ("import os; os._exit(0)", "error", "it ended by itself"),
        ("import os; os.abort()", "error", "it was ended by SIGABRT"),
        ("raise ValueError(object())", "error", "ValueError: <object object>"),
    ],
)
def test_outcomes_of_programs(any_sandbox: Sandbox, source: str, status: str, message: str) -> None:
    outcome = any_sandbox.run(Program(source))
    assert outcome.status == status
    assert message in outcome.message


def test_function_may_be_a_module_a_body_or_an_expression(any_sandbox: Sandbox) -> None:
    test = "assert f(3) == 7"
    for source in (
        "def f(x):\n    return 2 * x + 1",
        "import math\n@staticmethod\ndef f(x): return 2 * x + 1",
        "f = lambda x: 2 * x + 1",
        "2 * x + 1",
        "2 * x + 1  # twice and one",
        "y = 2 * x\nreturn y + 1",
        "    y = 2 * x\n    return y + 1",
        "import math; return 2 * x + math.gcd(1, 1)",
        "(2 * x\n + 1)",
    ):
        assert verdicts(any_sandbox, source, test) == ["pass"], source
    missing = any_sandbox.run(Program("def g(x): return x", "f", ("x",)), Tests((test,)))
    assert (missing.status, missing.message) == ("error", "NameError: f is not defined")


def test_verdicts_of_tests(sandbox: Sandbox) -> None:
    outcome = sandbox.run(
        Program("10 // x", "f", ("x",)),
        Tests(
            ("assert f(5) == 2", "assert f(4) == 3", "y = 1\nassert f(0) == 1, y", "assert candidate(1) == 10", "assert f('a')")
        ),
    )
    found = [(result.verdict, result.message, result.call, result.value) for result in outcome.results]
    assert found == [
        ("pass", "", "f(5)", "2"),
        ("fail", "assert f(4) == 3: AssertionError", "f(4)", "2"),
        ("error", "ZeroDivisionError: integer division or modulo by zero", "f(0)", ""),
        ("pass", "", "f(1)", "10"),
        ("error", "TypeError: unsupported operand type(s) for //: 'int' and 'str'", "f('a')", ""),
    ]
    assert not outcome.passed


def test_tests_may_expect_an_exception_and_use_helpers(any_sandbox: Sandbox) -> None:
    raising = "def f(x):\n    raise KeyError('no')"
    expected = "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert False"
    assert verdicts(any_sandbox, raising, expected) == ["pass"]
    helper = "import math\ndef near(a, b): return abs(a - b) < 1e-6"
    assert verdicts(
        any_sandbox, "x ** 0.5", "assert near(f(2), math.sqrt(2))", "for n in range(9): assert near(f(n * n), n)", context=helper
    ) == [
        "pass",
        "pass",
    ]


def test_changes_of_arguments_are_visible_in_tests(any_sandbox: Sandbox) -> None:
    assert verdicts(any_sandbox, "x.sort()\nreturn None", "a = [2, 1]\nf(a)\nassert a == [1, 2]") == ["pass"]


def test_broken_tests_are_distinguished_from_failures(any_sandbox: Sandbox) -> None:
    assert verdicts(any_sandbox, "x", "assert f(", "assert f(1) == 1") == ["broken", "pass"]
    assert verdicts(any_sandbox, "x", "assert f(1) == 1", context="1 / 0") == ["broken"]
    assert verdicts(any_sandbox, "x", "assert f(print)", "assert f(1) == 1") == ["broken", "pass"]


def test_program_cannot_read_or_fake_its_tests(any_sandbox: Sandbox) -> None:
    """Contract: no reward for finding the expected values, for objects that equal everything, or for exiting early."""
    hidden = Tests(("assert f(1) == 'q7w1'",))  # no hexadecimal digits, which addresses in a repr have
    search = """
import gc, re, sys
def f(x):
    frame, seen = sys._getframe(), [repr(gc.get_objects())]
    while frame:
        seen += [repr(frame.f_locals), repr(frame.f_globals)]
        frame = frame.f_back
    found = re.search('q7[a-z]1', ' '.join(seen))
    return found.group() if found else None"""
    always = "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()"
    text = "class Any(str):\n    def __eq__(self, other): return True\ndef f(x): return Any('b')"
    leave = "import os\ndef f(x): os._exit(0)"
    patch = "import builtins\nbuiltins.AssertionError = KeyError\ndef f(x): raise AssertionError"
    forged = """
import json, os
for number in range(3, 64):
    for status in ({"verdict": "pass", "message": "", "call": "", "value": ""}, {"status": "ok", "message": ""}):
        data = json.dumps(status).encode()
        try: os.write(number, len(data).to_bytes(4, 'big') + data)
        except OSError: pass
def f(x): return 0"""
    for source in (search, always, text, leave, patch, forged):
        outcome = any_sandbox.run(Program(source, "f"), hidden)
        assert not outcome.passed, source
    assert any_sandbox.run(Program("'q7w1'", "f", ("x",)), hidden).passed


def test_programs_do_not_affect_later_ones(sandbox: Sandbox) -> None:
    sandbox.run(Program("import builtins, math\nbuiltins.len = None\nmath.pi = 3\nopen('left', 'w').close()"))
    assert sandbox.run(Program("import math, os\nprint(len('abc'), math.pi > 3.1, os.listdir('.'))")).output == "3 True []\n"


def test_outcomes_are_deterministic(bubblewrap: Sandbox) -> None:
    """Contract: hashes and messages do not differ between servers (unseeded random numbers may)."""
    program = Program("print({'a', 'b', 'c', 'd'}, hash('x'))\nraise ValueError(object())")
    first = bubblewrap.run(program)
    bubblewrap.close()
    assert bubblewrap.run(program) == first


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        10**30,
        1.5,
        "é\udc80",
        b"x",
        [1, [2]],
        (1, ("a",)),
        {1, 2},
        frozenset("a"),
        {"a": (1,), 2: [3]},
        1 + 2j,
        range(1, 9, 3),
    ],
)
def test_plain_values_round_trip(value: object) -> None:
    again = decode(encode(value))
    assert again == value
    assert type(again) is type(value)


def test_other_values_are_rejected() -> None:
    assert list(decode(encode(iter([1, 2])))) == [1, 2]
    for value in (object(), print, [lambda: 0]):
        with pytest.raises(TypeError, match="is no plain value"):
            encode(value)
    for data in ({"a": 1}, ["eval", "1"]):
        with pytest.raises(ValueError, match="no value"):
            decode(data)


def test_error_that_fails_to_print_is_named() -> None:
    class BadError(Exception):
        def __str__(self) -> str:
            raise KeyError

    assert describe(BadError()) == "BadError"


def test_killed_server_is_replaced(bubblewrap: Sandbox) -> None:
    bubblewrap.run(Program("1"))
    bubblewrap._servers[0].process.kill()
    assert bubblewrap.run(Program("print(1)")).output == "1\n"


def test_forked_process_starts_its_own_server(bubblewrap: Sandbox) -> None:
    bubblewrap.run(Program("1"))
    server = bubblewrap._servers[0]
    if (pid := os.fork()) == 0:
        os._exit(0 if bubblewrap.run(Program("print(2)")).output == "2\n" and bubblewrap._servers[0] is not server else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert bubblewrap.run(Program("print(1)")).output == "1\n"
    assert bubblewrap._servers[0] is server


def test_without_a_back_end_no_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the unsafe back end is never chosen automatically, and the error says what to do."""
    monkeypatch.setattr(probe, "fault", lambda name: f"{name} is missing: install it")
    probe._choose.cache_clear()
    try:
        with pytest.raises(SandboxError) as raised:
            Sandbox().run(Program("print(1)"))
    finally:
        probe._choose.cache_clear()
    for part in ("- bubblewrap: bubblewrap is missing", "- sandlock: sandlock is missing", "sandbox.backend: unsafe_subprocess"):
        assert part in str(raised.value)


def test_probe_names_what_a_back_end_does_not_prevent() -> None:
    """Contract: an ordinary process prevents nothing."""
    found = probe.breaches(BACKENDS["unsafe_subprocess"])
    assert found is not None
    for what in ("reading a file of the host", "connecting to the host", "signalling a process of the host"):
        assert what in found


@pytest.mark.parametrize("backend", [*SAFE, "unsafe_subprocess"])
def test_back_end_in_use_is_reported(backend: str) -> None:
    if reason := probe.fault(backend):
        pytest.skip(f"{backend}: {reason}")
    run = f"from stages.sandbox import *; print(Sandbox(SandboxSettings(backend={backend!r})).run(Program('print(42)')).output)"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "42"
    wanted = "sandbox: WARNING: sandbox.backend is unsafe_subprocess" if backend not in SAFE else "sandbox: programs run in "
    assert done.stderr.startswith(wanted)


def test_unsafe_back_end_must_be_requested() -> None:
    assert SandboxSettings().backend == "auto"
    assert "unsafe_subprocess" not in SAFE
    with pytest.raises(ValueError, match="backend"):
        SandboxSettings(backend="subprocess")


def test_integers_of_more_digits_than_python_converts(any_sandbox: Sandbox) -> None:
    factorial = "result = 1\nfor number in range(2, x + 1):\n    result *= number\nreturn result"
    assert verdicts(any_sandbox, factorial, "assert f(1700) % 7 == 0", "assert f(3) == 6", "assert f(1700) == 5") == [
        "pass",
        "pass",
        "fail",
    ]
    assert decode(encode([10**5000, -(10**5000)])) == [10**5000, -(10**5000)]


def test_messages_are_text_to_a_tokenizer() -> None:
    assert describe(ValueError(chr(0xD83D))) == "ValueError: \\ud83d"


def test_interrupt_that_also_ends_the_server_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: after Ctrl-C, which a terminal also sends to the sandbox, no program is run again."""

    class Ending:
        spent = False

        def fork(self, role: str, sockets: object) -> None:
            raise KeyboardInterrupt

        def end(self) -> None:
            raise LostError("it ended")

        def close(self) -> None:
            pass

    sandbox = Sandbox(SandboxSettings(backend="unsafe_subprocess"))
    monkeypatch.setattr(sandbox, "_server", Ending)
    with pytest.raises(KeyboardInterrupt):
        sandbox.run(Program("print(1)"))
