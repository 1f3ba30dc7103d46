"""`python -m stages.tracking.ui`: the MLflow UI for this checkout's runs (or MLFLOW_TRACKING_URI's), and beside it the report and
what is training, all bound to 127.0.0.1.

Takes the options of `mlflow ui`, and `--report-port` (5001; 0: without the report).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.runtime.command import command, port_or_any
from stages.runtime.files import locked
from stages.tracking.spool import FOLDER
from stages.tracking.store import DATABASE, relocate

SETTINGS = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # otherwise the UI starts worker processes that outlive it
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
LOCAL_NAMES = ("127.0.0.1", "localhost")
"""Accepted Host headers, against DNS rebinding: a page whose name resolves to 127.0.0.1 still sends its own name."""


MLFLOW_URL, REPORT_PORT = "BELLWETHER_MLFLOW_URL", 5001
"""Environment variable that tells the report's server where MLflow is; the report's port."""


def served(given: Sequence[str]) -> tuple[str, int, list[str]]:
    """The UI's address, the report's port, and the options to pass to `mlflow ui`."""
    parser = argparse.ArgumentParser(prog="python -m stages.tracking.ui", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--host", default=os.environ.get("MLFLOW_HOST") or "127.0.0.1")
    parser.add_argument("-p", "--port", default=os.environ.get("MLFLOW_PORT") or "5000")
    parser.add_argument("--allowed-hosts", default=os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS"))
    parser.add_argument("--cors-allowed-origins", default=os.environ.get("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"))
    parser.add_argument("--report-port", type=port_or_any, default=REPORT_PORT)
    own, others = parser.parse_known_args(given)
    hosts = own.allowed_hosts or ",".join(f"{host},{host}:*" for host in LOCAL_NAMES)
    origins = own.cors_allowed_origins or ",".join(f"http://{host}:{own.port}" for host in LOCAL_NAMES)
    options = ["--host", own.host, "--port", own.port, "--workers", "1"]
    told = [*options, "--allowed-hosts", hosts, "--cors-allowed-origins", origins, *others]
    return f"http://{own.host}:{own.port}", own.report_port, told


def start_report(port: int, mlflow: str) -> None:
    """Start the server of the report, which ends with this process. Says so if the port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            print(f"ui: port {port} is already in use; UI_ARGS='--report-port N' serves the report on another", flush=True)
            return
    command = [sys.executable, "-m", "stages.live", "serve", "--port", str(port), "--with-parent", str(os.getpid())]
    subprocess.Popen(command, env={**os.environ, MLFLOW_URL: mlflow})


@command
def main() -> int:
    address, report_port, options = served(sys.argv[1:])
    root = Path.cwd()
    store = os.environ.get("MLFLOW_TRACKING_URI")
    if not store:
        store = f"sqlite:///{root / DATABASE}"
        with locked(root / FOLDER / "connect.lock", wait=True):
            relocate(root)
    print(f"ui: serving the runs on {address} (Ctrl-C to stop)", flush=True)
    if report_port:
        start_report(report_port, address)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store, *options])


if __name__ == "__main__":
    raise SystemExit(main())
