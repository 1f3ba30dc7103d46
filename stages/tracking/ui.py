"""`python -m stages.tracking.ui`: the MLflow UI for this checkout's runs (or MLFLOW_TRACKING_URI's), bound to 127.0.0.1.

Takes the options of `mlflow ui`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.runtime.command import command
from stages.runtime.files import locked
from stages.tracking.spool import FOLDER
from stages.tracking.store import DATABASE, relocate

SETTINGS = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # otherwise the UI starts worker processes that outlive it
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
LOCAL_NAMES = ("127.0.0.1", "localhost")
"""Accepted Host headers, against DNS rebinding: a page whose name resolves to 127.0.0.1 still sends its own name."""


def served(given: Sequence[str]) -> tuple[str, list[str]]:
    """The UI's address, and the options to pass to `mlflow ui`."""
    parser = argparse.ArgumentParser(prog="python -m stages.tracking.ui", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--host", default=os.environ.get("MLFLOW_HOST") or "127.0.0.1")
    parser.add_argument("-p", "--port", default=os.environ.get("MLFLOW_PORT") or "5000")
    parser.add_argument("--allowed-hosts", default=os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS"))
    parser.add_argument("--cors-allowed-origins", default=os.environ.get("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"))
    own, others = parser.parse_known_args(given)
    hosts = own.allowed_hosts or ",".join(f"{host},{host}:*" for host in LOCAL_NAMES)
    origins = own.cors_allowed_origins or ",".join(f"http://{host}:{own.port}" for host in LOCAL_NAMES)
    options = ["--host", own.host, "--port", own.port, "--workers", "1"]
    return f"http://{own.host}:{own.port}", [*options, "--allowed-hosts", hosts, "--cors-allowed-origins", origins, *others]


@command
def main() -> int:
    address, options = served(sys.argv[1:])
    root = Path.cwd()
    store = os.environ.get("MLFLOW_TRACKING_URI")
    if not store:
        store = f"sqlite:///{root / DATABASE}"
        with locked(root / FOLDER / "connect.lock", wait=True):
            relocate(root)
    print(f"ui: serving the runs on {address} (Ctrl-C to stop)", flush=True)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store, *options])


if __name__ == "__main__":
    raise SystemExit(main())
