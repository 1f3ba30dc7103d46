"""Programs in forks of one process: as if each had a Python of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stages.runtime.preloaded import LIBRARIES, Preloaded, PreloadedError

BUSY = "import time\nwhile time.process_time() < 0.3: pass"


@pytest.fixture
def process() -> Iterator[Preloaded]:
    made = Preloaded(dict(os.environ), libraries=["json"])
    yield made
    made.close()


def program(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text, encoding="utf-8")


def test_programs_run_one_after_another_in_a_fork_with_folder_and_modules_of_their_own(
    process: Preloaded, tmp_path: Path
) -> None:
    """Contract: also modules of ours, which the process itself has loaded."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "__init__.py").write_text("HERE = 'the workspace'", encoding="utf-8")
    says = "import os, sys, stages\nprint(__name__, sys.argv[1], os.getcwd(), stages.HERE, os.getpid())"
    program(tmp_path, "says", says)
    for _ in range(2):
        code, seconds = process.run(tmp_path, [["says", "a"], ["says", "b"]], tmp_path / "log")
        assert code == 0
        assert 0 < seconds < 5
    lines = [line.split() for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    assert [line[:2] for line in lines] == [["__main__", "a"], ["__main__", "b"]] * 2
    assert {line[2] for line in lines} == {str(tmp_path)}
    assert lines[0][-1] == lines[1][-1] != lines[2][-1]


def test_a_failing_program_is_the_last(process: Preloaded, tmp_path: Path) -> None:
    program(tmp_path, "ends", "print('last words')\nraise SystemExit(3)")
    program(tmp_path, "never", "print('never')")
    program(tmp_path, "raises", "raise ValueError('wrong')")
    program(tmp_path, "killed", "import os\nos.kill(os.getpid(), 9)")
    log = tmp_path / "log"
    assert process.run(tmp_path, [["ends"], ["never"]], log)[0] == 3
    assert log.read_text(encoding="utf-8") == "last words\n"
    assert process.run(tmp_path, [["raises"]], log)[0] == 1
    assert "ValueError: wrong" in log.read_text(encoding="utf-8")
    assert process.run(tmp_path, [["killed"]], log)[0] == -signal.SIGKILL


def test_children_count_and_waiting_does_not(process: Preloaded, tmp_path: Path) -> None:
    text = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {BUSY!r}], check=True)\ntime.sleep(1)"
    program(tmp_path, "works", text)
    assert 0.3 <= process.run(tmp_path, [["works"]], tmp_path / "log")[1] < 1.3


def test_libraries_are_imported_before_the_programs(tmp_path: Path) -> None:
    program(tmp_path, "looks", "import sys\nprint('torch' in sys.modules)")
    process = Preloaded(dict(os.environ), libraries=LIBRARIES)
    try:
        assert process.run(tmp_path, [["looks"]], tmp_path / "log")[0] == 0
        assert (tmp_path / "log").read_text(encoding="utf-8") == "True\n"
    finally:
        process.close()


def test_a_process_that_was_killed_is_named(process: Preloaded, tmp_path: Path) -> None:
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(PreloadedError, match="exit code -9"):
        process.run(tmp_path, [["json.tool"]], tmp_path / "log")
    assert process.ended


def test_a_killed_caller_leaves_neither_process_nor_program(tmp_path: Path) -> None:
    program(tmp_path, "waits", "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)")
    calls = (
        "import os, pathlib\nfrom stages.runtime.preloaded import Preloaded\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "Preloaded(dict(os.environ), libraries=[]).run(folder, [['waits']], folder / 'log')"
    )
    caller = subprocess.Popen([sys.executable, "-c", calls], cwd=Path(__file__).parents[2])
    pid = tmp_path / "pid"
    while not pid.exists() or not pid.read_text(encoding="utf-8"):
        assert caller.poll() is None
        time.sleep(0.05)
    started = [psutil.Process(int(pid.read_text(encoding="utf-8"))), *psutil.Process(caller.pid).children()]
    caller.kill()
    caller.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
