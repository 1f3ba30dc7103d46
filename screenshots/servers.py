"""The servers whose pages are photographed: those that are running, else ones started on free ports and ended afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST = "127.0.0.1"
READY_S = 600.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]


def answers(address: str) -> bool:
    """Whether a server answers there with anything but an error of its own."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


@contextmanager
def serving(command: list[str], ready: str, log: Path, environment: dict[str, str], root: Path) -> Iterator[None]:
    """`command` while the body runs, from when `ready` answers; all of it is ended afterwards, and when this process is killed.

    Raises RuntimeError with the end of its log if it ends early or does not answer.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.supervise", *command],
            cwd=root,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + READY_S
        while not answers(ready):
            if process.poll() is not None or time.monotonic() > deadline:
                said = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                raise RuntimeError(f"'{' '.join(command)}' does not answer at {ready}; the end of {log}:\n{said}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def mlflow_server(root: Path) -> Iterator[str]:
    """Address of MLflow: MLFLOW_TRACKING_URI if it is a server's, else a UI over the store that the stages write."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    if given.startswith("http"):
        yield given.rstrip("/")
        return
    store = given or f"sqlite:///{root / 'mlflow.db'}"
    if not given and not (root / "mlflow.db").exists():
        raise RuntimeError("there is no mlflow.db; run 'make lifecycle' first, with tracking on")
    address = f"http://{HOST}:{(port := free_port())}"
    command = [sys.executable, "-m", "mlflow", "ui", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--allowed-hosts", f"{HOST}:{port}"]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = root / ".bellwether" / "screenshots" / "mlflow.log"
    with serving([*command, "--backend-store-uri", store], f"{address}/health", log, environment, root):
        yield address


@contextmanager
def prefect_server(root: Path) -> Iterator[str]:
    """Address of Prefect: PREFECT_API_URL, else what listens where `make serve` does, else a server over .prefect here."""
    given = os.environ.get("PREFECT_API_URL", "").removesuffix("/api") or f"http://{HOST}:4200"
    if answers(f"{given}/api/health"):
        yield given
        return
    import flows  # noqa: F401  (Prefect's settings for this checkout)

    address = f"http://{HOST}:{(port := free_port())}"
    command = [sys.executable, "-m", "flows.local_server", "prefect", "--port", str(port)]
    # The UI's files name the server they talk to.
    environment = {"PREFECT_UI_API_URL": f"{address}/api", "PREFECT_API_URL": f"{address}/api"}
    log = root / ".bellwether" / "screenshots" / "prefect.log"
    with serving(command, f"{address}/api/health", log, environment, root):
        yield address
