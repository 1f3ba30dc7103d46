"""The servers for screenshots: running ones, else temporary ones on free ports."""

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
    """Whether a server responds without a server error (5xx)."""
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
    """Run `command` during the body, once `ready` responds; its processes end afterwards and if this process is killed.

    Raises RuntimeError with the end of its log if it exits early or does not respond.
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
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                raise RuntimeError(f"'{' '.join(command)}' does not respond at {ready}; the end of {log}:\n{tail}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def mlflow_server(root: Path) -> Iterator[str]:
    """Address of MLflow: MLFLOW_TRACKING_URI if it is a server, else a temporary UI for the local store."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    if given.startswith("http"):
        yield given.rstrip("/")
        return
    store = given or f"sqlite:///{root / 'mlflow.db'}"
    if not given and not (root / "mlflow.db").exists():
        raise RuntimeError("mlflow.db does not exist; run 'make lifecycle' first, with tracking on")
    address = f"http://{HOST}:{(port := free_port())}"
    command = [sys.executable, "-m", "mlflow", "ui", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--allowed-hosts", f"{HOST}:{port}"]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = root / ".bellwether" / "screenshots" / "mlflow.log"
    with serving([*command, "--backend-store-uri", store], f"{address}/health", log, environment, root):
        yield address


@contextmanager
def prefect_server(root: Path) -> Iterator[str]:
    """Address of Prefect: PREFECT_API_URL, else a server on the port of `make serve`, else a temporary server for .prefect."""
    given = os.environ.get("PREFECT_API_URL", "").removesuffix("/api") or f"http://{HOST}:4200"
    if answers(f"{given}/api/health"):
        yield given
        return
    import flows  # noqa: F401  (Prefect's settings for this checkout)

    address = f"http://{HOST}:{(port := free_port())}"
    command = [sys.executable, "-m", "flows.local_server", "prefect", "--port", str(port)]
    # The UI has its server's address built in.
    environment = {"PREFECT_UI_API_URL": f"{address}/api", "PREFECT_API_URL": f"{address}/api"}
    log = root / ".bellwether" / "screenshots" / "prefect.log"
    with serving(command, f"{address}/api/health", log, environment, root):
        yield address
