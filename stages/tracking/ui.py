"""`python -m stages.tracking.ui`: MLflow's pages over this checkout's runs (or MLFLOW_TRACKING_URI's), on this machine alone.

Options are those of `mlflow ui`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.runtime.command import command
from stages.runtime.files import locked
from stages.tracking.place import DATABASE, bring_up_to_date
from stages.tracking.spool import FOLDER

SETTINGS = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # without it the UI is two processes and leaves none behind
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
OWN_NAMES = ("127.0.0.1", "localhost")
"""How this machine calls itself: a page whose own name was pointed at 127.0.0.1 (DNS rebinding) still sends that name."""


def served(given: Sequence[str]) -> tuple[str, list[str]]:
    """The address of the pages, and the options of `mlflow ui` for those that were given."""
    parser = argparse.ArgumentParser(prog="python -m stages.tracking.ui", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--host", default=os.environ.get("MLFLOW_HOST") or "127.0.0.1")
    parser.add_argument("-p", "--port", default=os.environ.get("MLFLOW_PORT") or "5000")
    parser.add_argument("--allowed-hosts", default=os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS"))
    parser.add_argument("--cors-allowed-origins", default=os.environ.get("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"))
    own, others = parser.parse_known_args(given)
    hosts = own.allowed_hosts or ",".join(f"{host},{host}:*" for host in OWN_NAMES)
    origins = own.cors_allowed_origins or ",".join(f"http://{host}:{own.port}" for host in OWN_NAMES)
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
            bring_up_to_date(root)
    print(f"ui: {address} shows the runs (Ctrl-C ends it)", flush=True)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store, *options])


if __name__ == "__main__":
    raise SystemExit(main())
