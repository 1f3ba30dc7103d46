"""A command whose output nobody reads any more ends quietly; what other programs print is never fatal."""

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
"""Started by the sandbox, whose end of the pipe they answer to."""
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
    """Exit code and standard error of Python with `arguments`, whose output is closed before it prints.

    together: standard error is the same pipe, as under `2>&1 | head`.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BELLWETHER_TRACKING": "off"}
    stderr = subprocess.STDOUT if together else subprocess.PIPE
    with subprocess.Popen([sys.executable, *arguments], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=stderr) as child:
        assert child.stdout is not None
        child.stdout.close()
        said = child.stderr.read().decode() if child.stderr is not None else ""
        return child.wait(timeout=120), said


@pytest.mark.parametrize("line", ["stages.params", "stages.params --help", "flows.supervise -h"])
def test_a_closed_output_ends_a_command_quietly(line: str) -> None:
    """Contract: `| head` gets its lines, and nobody a traceback; the exit code is a shell's for SIGPIPE."""
    assert unread(["-m", *line.split()]) == (OUTPUT_CLOSED, "")


def test_so_does_a_closed_standard_error() -> None:
    assert unread(["-m", "stages.params", "--file", "nowhere.yaml"], together=True) == (OUTPUT_CLOSED, "")


@pytest.mark.parametrize("together", [False, True])
def test_a_stage_ends_too(tmp_path: Path, together: bool) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "toy.py").write_text(STAGE)
    assert unread(["toy.py"], tmp_path, together) == (OUTPUT_CLOSED, "")
    assert (tmp_path / "status").read_text() == "KILLED", "MLflow shows that it was ended"


def test_output_that_was_closed_all_along_changes_nothing() -> None:
    line = f"{sys.executable} -m stages.params >&-"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_broken_pipes_are_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """That of a worker or a server says that it died; it must not end the command as if all were well."""

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


def test_all_commands_begin_that_way() -> None:
    """Each `if __name__ == "__main__":` calls a function that is decorated with `command`, or `stage_run`, which is."""
    for path, tree in {
        **commands(),
        Path("stages/runtime/stage.py"): ast.parse((ROOT / "stages/runtime/stage.py").read_text()),
    }.items():
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        names = {node.name: [ast.unparse(item) for item in node.decorator_list] for node in functions}
        if path == Path("stages/runtime/stage.py"):
            assert "command" in names["stage_run"]
            continue
        # run_checks, which makes the commands that check plugins, decorates them.
        called = ast.unparse(tree.body[-1])
        if "main = run_checks(" in ast.unparse(tree):
            continue
        through_main = "main()" in called and "command" in names.get("main", ())
        assert "stage_run(" in called or through_main, f"{path}: decorate main with command"


def test_no_output_of_another_program_is_fatal() -> None:
    """Contract: bytes that are no UTF-8 are replaced. A DVC command, a stage or git may print any."""
    for path in [*source_files("stages"), *source_files("flows")]:
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
                given = {item.arg: ast.unparse(item.value) for item in node.keywords}
                if "text" in given or "encoding" in given:
                    assert given.get("errors") == "'replace'", f'{path}:{node.lineno}: add errors="replace"'
