"""However `make serve` is ended, its services end with it. Stub services suffice for that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from served import free_port, until
from test_supervise import gone

from flows import serve

ROOT = Path(__file__).resolve().parents[2]
SERVE = """
import sys
from pathlib import Path
from flows import serve

serve.FOLDER = Path(sys.argv[1])
serve.STATE = serve.FOLDER / "serve.json"
serve.ROOT = Path(sys.argv[1])
long = "trap '' INT; sleep 300 & echo $! > {0}/{1}; setsid sleep 300 & echo $! > {0}/{1}2; wait"
parts = [serve.Service(name, ["bash", "-c", long.format(sys.argv[1], name)]) for name in ("server", "worker")]
parts[1].command[2] = sys.argv[2] or parts[1].command[2]
serve.services = lambda ports: (parts[:1], parts[1:], "http://127.0.0.1:9")
serve.Service.wait_for_exit = lambda service: service.stop()
sys.argv[1:] = sys.argv[3:]
"""
MAIN = "sys.exit(serve.main())"
TWO_SIGNALS = """
import os, signal, time

def check(service):
    both = (signal.SIGINT, signal.SIGTERM)
    while not all((serve.FOLDER / name).exists() for name in ("server2", "worker2")):
        time.sleep(0.05)
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)

serve.Service.check = check
"""


def start(folder: Path, worker: str = "", code: str = "") -> subprocess.Popen:
    ports = [f"--{name}={free_port()}" for name in ("port", "mlflow-port", "report-port")]
    command = [sys.executable, "-c", SERVE + code + MAIN, str(folder), worker, *ports]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def children(folder: Path) -> list[int]:
    files = [folder / name for name in ("server", "server2", "worker", "worker2")]
    until(lambda: all(file.exists() and file.read_text().strip() for file in files), "the services have started")
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_any_signal_ends_all_services(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, `make serve-stop` and kill -9 leave no process behind."""
    process = start(tmp_path)
    pids = children(tmp_path)
    process.send_signal(number)
    process.wait()
    until(lambda: all(gone(pid) for pid in pids), "the services have ended", 60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 0)


def test_service_that_exits_ends_the_others_and_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, "echo the port is taken; exit 3")
    output, _ = process.communicate(timeout=None)
    assert process.returncode == 1
    assert "worker exited (exit code 3)" in output
    assert "the port is taken" in output
    assert gone(int((tmp_path / "server").read_text()))


def test_second_instance_names_the_running_process(tmp_path: Path) -> None:
    first = start(tmp_path)
    children(tmp_path)
    second = start(tmp_path)
    output, _ = second.communicate(timeout=None)
    assert second.returncode == 2
    assert f"already running (process {first.pid})" in output
    first.terminate()
    assert first.wait() == 0


def test_second_signal_does_not_interrupt_the_end(tmp_path: Path) -> None:
    """Ctrl-C and `make serve-stop` at a time: the services are stopped in order, and runs that are lost are marked."""
    process = start(tmp_path, code=TWO_SIGNALS)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert not (tmp_path / "serve.json").exists()


def test_server_that_ends_before_it_is_told_to_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    monkeypatch.setattr(serve, "running", lambda: {"pid": ended.pid, "process": "1"})
    assert serve.stop() == 0
