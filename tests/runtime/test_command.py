"""Commands end quietly when their output is closed, and accept any bytes from other programs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_imports import ROOT, source_files

from stages.runtime.command import OUTPUT_CLOSED, command

IN_THE_SANDBOX = {Path("stages/sandbox/sandlock_runner.py"), Path("stages/sandbox/guest/server.py")}
"""Started by the sandbox, which reads their output."""
STAGE = """
from stages import params
from stages.runtime.stage import stage_run
from stages.runtime.tracker import Tracker

class ClosingTracker(Tracker):
    def close(self, status):
        open("status", "w").write(status)

def run(context):
    while True:
        print("a line", flush=True)

raise SystemExit(stage_run("toy", run, params, lambda *given: ClosingTracker()))
"""


def unread(arguments: list[str], cwd: Path = ROOT, together: bool = False) -> tuple[int, str]:
    """Exit code and standard error of `python arguments`, whose standard output is closed before it prints.

    together: standard error goes to the same pipe, as with `2>&1 | head`.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BELLWETHER_TRACKING": "off"}
    stderr = subprocess.STDOUT if together else subprocess.PIPE
    with subprocess.Popen([sys.executable, *arguments], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=stderr) as child:
        assert child.stdout is not None
        child.stdout.close()
        stderr_text = child.stderr.read().decode() if child.stderr is not None else ""
        return child.wait(timeout=120), stderr_text


@pytest.mark.parametrize(
    "line", [pytest.param("stages.params", marks=pytest.mark.slow), "stages.params --help", "flows.supervise -h"]
)
def test_closed_stdout_ends_a_command_quietly(line: str) -> None:
    """Contract: with `| head` there is no traceback; the exit code is a shell's for SIGPIPE."""
    assert unread(["-m", *line.split()]) == (OUTPUT_CLOSED, "")


def test_closed_stderr_ends_a_command_quietly() -> None:
    assert unread(["-m", "stages.params", "--file", "nowhere.yaml"], together=True) == (OUTPUT_CLOSED, "")


@pytest.mark.parametrize("together", [False, True])
def test_closed_stdout_ends_a_stage_as_killed(tmp_path: Path, together: bool) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "toy.py").write_text(STAGE)
    assert unread(["toy.py"], tmp_path, together) == (OUTPUT_CLOSED, "")
    assert (tmp_path / "status").read_text() == "KILLED", "MLflow shows the run as killed"


@pytest.mark.slow
def test_command_started_without_stdout_succeeds() -> None:
    line = f"{sys.executable} -m stages.params >&-"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_broken_pipes_other_than_stdout_are_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """A broken pipe to a worker or server means that it died; the command must not end as if it had succeeded."""

    @command
    def broken() -> int:
        raise BrokenPipeError(32, "Broken pipe")

    @command
    def fine(code: int) -> int:
        print("text")
        return code

    with pytest.raises(BrokenPipeError):
        broken()
    assert fine(3) == 3
    assert capsys.readouterr().out == "text\n"


def commands() -> dict[Path, ast.Module]:
    """The modules that are run by `python -m`."""
    found = {}
    for path in [*source_files("stages"), *source_files("flows")]:
        text = (ROOT / path).read_text(encoding="utf-8")
        if re.search(r'^if __name__ == "__main__":', text, re.M) and path not in IN_THE_SANDBOX:
            found[path] = ast.parse(text)
    return found


def test_all_commands_are_decorated() -> None:
    """Each `if __name__ == "__main__":` calls a function decorated with `command`, or `stage_run`, which is."""
    for path, tree in {
        **commands(),
        Path("stages/runtime/stage.py"): ast.parse((ROOT / "stages/runtime/stage.py").read_text()),
    }.items():
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        names = {node.name: [ast.unparse(item) for item in node.decorator_list] for node in functions}
        if path == Path("stages/runtime/stage.py"):
            assert "command" in names["stage_run"]
            continue
        # run_checks decorates the commands it makes, which check plugins.
        called = ast.unparse(tree.body[-1])
        if "main = run_checks(" in ast.unparse(tree):
            continue
        through_main = "main()" in called and "command" in names.get("main", ())
        assert "stage_run(" in called or through_main, f"{path}: decorate main with command"


def test_subprocess_output_is_decoded_with_replacement() -> None:
    """Contract: invalid UTF-8 in the output of DVC, git or a stage is replaced."""
    for path in [*source_files("stages"), *source_files("flows")]:
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
                given = {item.arg: ast.unparse(item.value) for item in node.keywords}
                if "text" in given or "encoding" in given:
                    assert given.get("errors") == "'replace'", f'{path}:{node.lineno}: add errors="replace"'
