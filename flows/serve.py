"""`make serve`: Prefect's server and worker, the deployments, the watch for changes, MLflow's UI and the report, in one command.

All of it is bound to 127.0.0.1, needs no network, reports to nobody, and ends together: at Ctrl-C, at `make serve-stop`, when one
part ends by itself, and when this process is killed. Logs are in .bellwether/serve. Prefect's API, which can run commands, wants
the password in .prefect/auth (flows/auth.py); all parts answer to this machine's own names alone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from flows import auth
from flows.pages import MLFLOW_URL, REPORT_URL
from flows.process import ROOT
from stages.runtime.command import command
from stages.runtime.files import atomic_text

FOLDER = ROOT / ".bellwether" / "serve"
STATE = FOLDER / "serve.json"
HOST = "127.0.0.1"
POOL = "bellwether"
READY_S = 300.0
"""How long a part may take to answer; a server that makes its database on a busy disk takes a while."""
WORKER_GRACE_S, GRACE_S = 15.0, 5.0
"""The worker ends its runs and reports them before it goes."""
STOP_S = 60.0
TRIES = 10


class _StopError(Exception):
    """SIGTERM or Ctrl-C came."""


class FailedError(RuntimeError):
    """A part did not start, or ended by itself."""


@dataclass
class Part:
    """A process that serves. `ready`: an address that answers once it is up."""

    name: str
    command: list[str]
    ready: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    grace_s: float = GRACE_S
    process: subprocess.Popen | None = None

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"

    def start(self, environment: dict[str, str]) -> None:
        """In a session of its own, so that Ctrl-C reaches this process alone, which then ends the parts in their order."""
        supervised = [sys.executable, "-m", "flows.supervise", "--sweep", "--grace", str(self.grace_s), *self.command]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                supervised,
                cwd=ROOT,
                env={**environment, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises FailedError if it has ended."""
        if self.process is not None and self.process.poll() is not None:
            said = "".join(f"\n    {line}" for line in self.log.read_text(errors="replace").splitlines()[-12:])
            raise FailedError(f"{self.name} ended (exit code {self.process.returncode}); the end of {self.log}:{said}")

    def wait(self) -> None:
        """Until it answers. Raises FailedError if it ends first, or takes too long."""
        deadline = time.monotonic() + READY_S
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while self.ready is not None:
                self.check()
                try:
                    client.get(self.ready)
                    return
                except httpx.HTTPError:
                    if time.monotonic() > deadline:
                        raise FailedError(f"{self.name} did not answer within {READY_S:.0f} s; see {self.log}") from None
                    time.sleep(0.25)

    def finish(self) -> None:
        """Until it has done its work. Raises FailedError if it could not."""
        while self.process is not None and self.process.poll() != 0:
            self.check()
            time.sleep(0.1)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def environment(ports: argparse.Namespace, mlflow: str) -> dict[str, str]:
    """What all parts run with, the flow runs of the worker too."""
    local = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), *auth.HOSTS]))
    password = auth.settings(os.environ)[auth.SERVER]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "NO_PROXY": local,
        "no_proxy": local,
        "PREFECT_API_URL": f"http://{HOST}:{ports.port}/api",
        auth.API: password,
        auth.SERVER: password,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": auth.origins(ports.port),
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(ports.port),
        "PREFECT_LOGGING_LEVEL": "INFO",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # without it the UI is two processes and leaves none behind
        REPORT_URL: f"http://{HOST}:{ports.report_port}/report.html",
        MLFLOW_URL: mlflow,
    }


def parts(ports: argparse.Namespace) -> tuple[list[Part], list[Part], str]:
    """What serves; what works once the deployments are made; MLflow's address."""
    python = [sys.executable, "-m"]
    server = [*python, "flows.local_server", "prefect", "--port", str(ports.port)]
    report = [*python, "flows.local_server", "report", "--port", str(ports.report_port)]
    found = [
        Part("prefect-server", server, f"http://{HOST}:{ports.port}/api/health"),
        Part("report", report, f"http://{HOST}:{ports.report_port}/"),
    ]
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    mlflow = given
    if not given.startswith("http"):  # a server of its own has its own UI
        mlflow = f"http://{HOST}:{ports.mlflow_port}"
        ui = [*python, "stages.tracking.ui", "--host", HOST, "--port", str(ports.mlflow_port)]
        found.append(Part("mlflow-ui", ui, f"{mlflow}/health"))
    worker = [*python, "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--install-policy", "never"]
    works = [Part("worker", worker, grace_s=WORKER_GRACE_S), Part("watch", [*python, "flows.watch"])]
    return found, works, mlflow


def password_file() -> str:
    """Where the password is, as it is told to the user."""
    path = auth.file(os.environ)
    if not path.exists() or path.read_text(encoding="ascii").strip() != os.environ[auth.SERVER]:
        return f"${auth.SERVER}"
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def end_lost_runs(api: str, password: str) -> None:
    """Runs that a worker was to run become Crashed where they count as running although no worker is there."""
    wanted = {
        "flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}, "deployment_id": {"is_null_": False}}
    }
    message = "Its worker was ended. Run the deployment again: stages go on from their checkpoints."
    state = {"type": "CRASHED", "name": "Crashed", "message": message}

    def ask(path: str, values: dict[str, Any]) -> Any:
        for _ in range(TRIES):  # 503: the server's database is locked by another writer
            answer = client.post(f"{api}{path}", json=values)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(0.5)
        return answer.raise_for_status().json()

    with httpx.Client(timeout=10.0, trust_env=False, auth=auth.pair(password)) as client, contextlib.suppress(httpx.HTTPError):
        for run in ask("/flow_runs/filter", wanted):
            ask(f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
            print(f"serve: run {run['name']} was ended with its worker", flush=True)


def serve(ports: argparse.Namespace) -> int:
    """Run until told to end, or until a part ends by itself. Exit code: 0 told, 1 a part failed."""
    taken = [port for port in (ports.port, ports.mlflow_port, ports.report_port) if not port_is_free(port)]
    if taken:
        numbers, others = ", ".join(map(str, taken)), "--port 4210 --mlflow-port 5010 --report-port 5011"
        print(f"serve: port {numbers} is taken. For others: make serve SERVE_ARGS='{others}'", file=sys.stderr)
        return 2
    first, then, mlflow = parts(ports)
    settings = environment(ports, mlflow)
    bootstrap = Part("bootstrap", [sys.executable, "-m", "flows.bootstrap"])
    print("serve: starting", flush=True)
    try:
        for part in first:
            part.start(settings)
        for part in first:
            part.wait()
        end_lost_runs(settings["PREFECT_API_URL"], settings[auth.API])
        bootstrap.start(settings)
        bootstrap.finish()
        for part in then:
            part.start(settings)
        print(f"serve: Prefect   http://{HOST}:{ports.port} (its password is in {password_file()})", flush=True)
        print(f"serve: MLflow    {mlflow}", flush=True)
        print(f"serve: report    {settings[REPORT_URL]}", flush=True)
        print(f"serve: logs in {FOLDER.relative_to(ROOT)}; Ctrl-C or 'make serve-stop' ends all of it", flush=True)
        while True:
            for part in (*first, *then):
                part.check()
            time.sleep(0.5)
    except _StopError:
        print("serve: ending", flush=True)
        return 0
    except FailedError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        # The server last: it is still told how runs ended.
        for part in (*reversed(then), bootstrap):
            part.end()
        end_lost_runs(settings["PREFECT_API_URL"], settings[auth.API])
        for part in reversed(first):
            part.end()
        STATE.unlink(missing_ok=True)


def _stop(signum: int, frame: object) -> None:
    raise _StopError(signum)


def start(ports: argparse.Namespace) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "serve.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"serve: already at work (process {running().get('pid', 'unknown')}); 'make serve-stop' ends it", file=sys.stderr
            )
            return 2
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        me = psutil.Process()
        atomic_text(STATE, json.dumps({"pid": me.pid, "created": me.create_time(), **vars(ports)}))
        return serve(ports)


def running() -> dict[str, Any]:
    """What the `make serve` at work has said of itself; {} where there is none."""
    try:
        state = json.loads(STATE.read_text(encoding="utf-8"))
        return state if psutil.Process(state["pid"]).create_time() == state["created"] else {}
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return {}


def stop() -> int:
    """End the `make serve` at work and wait until all of it is gone. Exit code: 0 none is left, 1 it did not end in time."""
    state = running()
    if not state:
        print("serve: nothing to stop")
        return 0
    process = psutil.Process(state["pid"])
    process.terminate()
    deadline = time.monotonic() + STOP_S
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            print(f"serve: process {process.pid} is still ending after {STOP_S:.0f} s; its logs are in {FOLDER}", file=sys.stderr)
            return 1
        time.sleep(0.1)
    print("serve: stopped")
    return 0


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.serve", description="Serve Prefect, MLflow and the report on 127.0.0.1."
    )
    parser.add_argument("--stop", action="store_true", help="end the one that is at work")
    parser.add_argument("--port", type=int, default=4200, help="of Prefect's UI and API")
    parser.add_argument("--mlflow-port", type=int, default=5000)
    parser.add_argument("--report-port", type=int, default=5001)
    options = parser.parse_args()
    if options.stop:
        return stop()
    del options.stop
    return start(options)


if __name__ == "__main__":
    sys.exit(main())
