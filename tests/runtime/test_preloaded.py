"""Programs in forks of one process: as if each had a Python of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def pid_in(file: Path) -> int:
    """The process that writes its number to `file`."""
    while not file.exists() or not file.read_text(encoding="utf-8"):
        time.sleep(0.05)
    return int(file.read_text(encoding="utf-8"))


def test_a_process_that_is_killed_takes_its_program_with_it(process: Preloaded, tmp_path: Path) -> None:
    """Contract: the caller does not wait for a program whose outcome nobody can tell it."""
    program(tmp_path, "waits", "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(20)")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(process.run, tmp_path, [["waits"]], tmp_path / "log")
        running = psutil.Process(pid_in(tmp_path / "pid"))
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(PreloadedError, match="exit code -9"):
            call.result(timeout=10)
    assert not psutil.wait_procs([running], timeout=10)[1]


def test_ctrl_c_during_the_imports_starts_no_program(tmp_path: Path) -> None:
    slow = "import os, pathlib, time\npathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\ntime.sleep(2)"
    program(tmp_path, "slow", slow)
    program(tmp_path, "never", "print('never')")
    process = Preloaded({**os.environ, "PYTHONPATH": str(tmp_path)}, libraries=["slow"])
    os.kill(pid_in(tmp_path / "pid"), signal.SIGINT)
    with pytest.raises(PreloadedError, match="exit code -2"):
        process.run(tmp_path, [["never"]], tmp_path / "log")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_programs_ignore_ctrl_c_where_the_caller_does(tmp_path: Path, handler: signal.Handlers) -> None:
    """Contract: as any child, such as those of a shell's background jobs."""
    program(tmp_path, "says", "import signal\nprint(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)")
    before = signal.signal(signal.SIGINT, handler)
    try:
        process = Preloaded(dict(os.environ), libraries=[])
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.run(tmp_path, [["says"]], tmp_path / "log")[0] == 0
    process.close()
    assert (tmp_path / "log").read_text(encoding="utf-8") == f"{handler is signal.SIG_IGN}\n"


def test_a_killed_caller_leaves_neither_process_nor_program(tmp_path: Path) -> None:
    program(tmp_path, "waits", "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)")
    calls = (
        "import os, pathlib\nfrom stages.runtime.preloaded import Preloaded\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "Preloaded(dict(os.environ), libraries=[]).run(folder, [['waits']], folder / 'log')"
    )
    caller = subprocess.Popen([sys.executable, "-c", calls], cwd=Path(__file__).parents[2])
    started = [psutil.Process(pid_in(tmp_path / "pid")), *psutil.Process(caller.pid).children()]
    caller.kill()
    caller.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
