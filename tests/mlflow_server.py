"""A real MLflow server for tests: on 127.0.0.1, offline, killed with all its processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MlflowServer:
    """Serves the database `folder`/mlflow.db, with artifacts in the same folder. A restart after `kill` keeps the address."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder, self.port = folder, port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, within_s: float = 120.0) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        command += ["--artifacts-destination", str(self.folder / "mlartifacts")]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**clean, **ENVIRONMENT}, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        deadline = time.monotonic() + within_s
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the MLflow server does not answer"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """kill -9, as in a machine failure."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def serving(folder: Path, database: Path | None = None) -> Iterator[MlflowServer]:
    """A server over a copy of `database` (making an empty one takes seconds), or over the existing files in `folder`."""
    if database is not None:
        shutil.copyfile(database, folder / "mlflow.db")
    server = MlflowServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
