"""`make serve`: Prefect's server and worker, the deployments, the watch for changes, MLflow's UI and the report, in one command.

All services listen on 127.0.0.1 only, need no network, send no telemetry, and stop together: at Ctrl-C, at `make serve-stop`,
when one of them exits, and when this process is killed. Logs are in .bellwether/serve. Prefect's API, which can run commands,
requires the password in .prefect/auth (flows/auth.py). Ours, since Prefect's `serve()` starts no server or other service and does
not end the runs of a killed worker.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from flows import auth
from flows.pages import MLFLOW_URL, REPORT_URL
from flows.process import ROOT, TAIL_LINES, python_environment, quoted
from stages.runtime.command import command, port_number
from stages.runtime.files import atomic_text
from stages.runtime.process import process_identity, supervised

FOLDER = ROOT / ".bellwether" / "serve"
STATE = FOLDER / "serve.json"
HOST = "127.0.0.1"
POOL = "bellwether"
READY_S = 300.0
"""How long a service may take to respond; a server that creates its database on a busy disk is slow."""
WORKER_GRACE_S, GRACE_S = 15.0, 5.0
"""Time between SIGTERM and SIGKILL; the worker first ends and reports its runs."""
STOP_S = 60.0
TRIES = 10


class _StopError(Exception):
    """SIGTERM or Ctrl-C was received."""


class FailedError(RuntimeError):
    """A service did not start, or exited by itself."""


@dataclass
class Service:
    """A long-running process. `ready`: a URL that responds once it is up."""

    name: str
    command: list[str]
    ready: str | None = None
    grace_s: float = GRACE_S
    process: subprocess.Popen | None = None

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"

    def start(self, environment: dict[str, str]) -> None:
        """Start it in a session of its own: Ctrl-C then reaches this process only, which stops the services in order."""
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                supervised(self.command, "--sweep", "--grace", str(self.grace_s)),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises FailedError if it has exited."""
        if self.process is not None and self.process.poll() is not None:
            tail = quoted(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise FailedError(f"{self.name} exited (exit code {self.process.returncode}); the end of {self.log}:{tail}")

    def wait(self) -> None:
        """Wait until it responds. Raises FailedError if it exits first, or takes too long."""
        deadline = time.monotonic() + READY_S
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while self.ready is not None:
                self.check()
                try:
                    client.get(self.ready)
                    return
                except httpx.HTTPError:
                    if time.monotonic() > deadline:
                        raise FailedError(f"{self.name} did not respond within {READY_S:.0f} s; see {self.log}") from None
                    time.sleep(0.25)

    def wait_for_exit(self) -> None:
        """Wait until it succeeds. Raises FailedError if it fails."""
        while self.process is not None and self.process.poll() != 0:
            self.check()
            time.sleep(0.1)

    def stop(self) -> None:
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
    """Environment variables of all services and of the worker's flow runs."""
    local = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), *auth.HOSTS]))
    password = auth.settings(os.environ)[auth.SERVER]
    return {
        **python_environment(),
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
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # else the UI starts job processes, which outlive it
        REPORT_URL: f"http://{HOST}:{ports.report_port}/report.html",
        MLFLOW_URL: mlflow,
    }


def services(ports: argparse.Namespace) -> tuple[list[Service], list[Service], str]:
    """The servers; the services that need the deployments; MLflow's address."""
    python = [sys.executable, "-m"]
    server = [*python, "flows.local_server", "prefect", "--port", str(ports.port)]
    report = [*python, "stages.live", "serve", "--port", str(ports.report_port)]
    servers = [
        Service("prefect-server", server, f"http://{HOST}:{ports.port}/api/health"),
        Service("report", report, f"http://{HOST}:{ports.report_port}/"),
    ]
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    mlflow = given
    if not given.startswith("http"):  # else the tracking server has a UI of its own
        mlflow = f"http://{HOST}:{ports.mlflow_port}"
        ui = [*python, "stages.tracking.ui", "--host", HOST, "--port", str(ports.mlflow_port), "--report-port", "0"]
        servers.append(Service("mlflow-ui", ui, f"{mlflow}/health"))
    worker = [*python, "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--install-policy", "never"]
    workers = [Service("worker", worker, grace_s=WORKER_GRACE_S), Service("watch", [*python, "flows.watch"])]
    return servers, workers, mlflow


def password_file() -> str:
    """Where the password is, as shown to the user."""
    path = auth.file(os.environ)
    if not path.exists() or path.read_text(encoding="ascii").strip() != os.environ[auth.SERVER]:
        return f"${auth.SERVER}"
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def mark_lost_runs(api: str, password: str) -> None:
    """Set runs of deployments that are still pending or running, although there is no worker, to Crashed."""
    wanted = {
        "flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}, "deployment_id": {"is_null_": False}}
    }
    message = "The worker was stopped. Run the deployment again: stages resume from their checkpoints."
    state = {"type": "CRASHED", "name": "Crashed", "message": message}

    def post(path: str, values: dict[str, Any]) -> Any:
        for _ in range(TRIES):  # 503: the server's database is locked by another writer
            response = client.post(f"{api}{path}", json=values)
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(0.5)
        return response.raise_for_status().json()

    with httpx.Client(timeout=10.0, trust_env=False, auth=auth.pair(password)) as client, contextlib.suppress(httpx.HTTPError):
        for run in post("/flow_runs/filter", wanted):
            post(f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
            print(f"serve: run {run['name']} was stopped with its worker", flush=True)


def serve(ports: argparse.Namespace) -> int:
    """Serve until stopped, or until a service exits. Exit code: 0 stopped, 1 a service failed, 2 a port is in use."""
    taken = [port for port in (ports.port, ports.mlflow_port, ports.report_port) if not port_is_free(port)]
    if taken:
        numbers, others = ", ".join(map(str, taken)), "--port 4210 --mlflow-port 5010 --report-port 5011"
        print(f"serve: port {numbers} is already in use; choose others: make serve SERVE_ARGS='{others}'", file=sys.stderr)
        return 2
    servers, workers, mlflow = services(ports)
    variables = environment(ports, mlflow)
    bootstrap = Service("bootstrap", [sys.executable, "-m", "flows.bootstrap"])
    print("serve: starting", flush=True)
    try:
        for service in servers:
            service.start(variables)
        for service in servers:
            service.wait()
        mark_lost_runs(variables["PREFECT_API_URL"], variables[auth.API])
        bootstrap.start(variables)
        bootstrap.wait_for_exit()
        for service in workers:
            service.start(variables)
        print(f"serve: Prefect   http://{HOST}:{ports.port} (password in {password_file()})", flush=True)
        print(f"serve: MLflow    {mlflow}", flush=True)
        print(f"serve: report    {variables[REPORT_URL]}", flush=True)
        print(f"serve: training  http://{HOST}:{ports.report_port}/live/", flush=True)
        print(f"serve: logs in {FOLDER.relative_to(ROOT)}; Ctrl-C or 'make serve-stop' stops everything", flush=True)
        while True:
            for service in (*servers, *workers):
                service.check()
            time.sleep(0.5)
    except _StopError:
        print("serve: stopping", flush=True)
        return 0
    except FailedError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    finally:
        _set_signals(signal.SIG_IGN)
        # The server last: it records how the runs ended.
        for service in (*reversed(workers), bootstrap):
            service.stop()
        mark_lost_runs(variables["PREFECT_API_URL"], variables[auth.API])
        for service in reversed(servers):
            service.stop()
        STATE.unlink(missing_ok=True)


def _set_signals(handler: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _stop(signum: int, frame: object) -> None:
    _set_signals(signal.SIG_IGN)  # a second signal must not interrupt what stops the services
    raise _StopError(signum)


def start(ports: argparse.Namespace) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "serve.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"serve: already running (process {running().get('pid', 'unknown')}); 'make serve-stop' stops it", file=sys.stderr
            )
            return 2
        _set_signals(_stop)
        pid = os.getpid()
        atomic_text(STATE, json.dumps({"pid": pid, "process": process_identity(pid), **vars(ports)}))
        return serve(ports)


def running() -> dict[str, Any]:
    """Process and ports of the running `make serve`; {} if there is none."""
    try:
        state = json.loads(STATE.read_text(encoding="utf-8"))
        return state if process_identity(state["pid"]) == state["process"] else {}
    except (OSError, ValueError, KeyError):
        return {}


def stop() -> int:
    """Stop the running `make serve` and wait for it. Exit code: 0 stopped or none running, 1 timed out."""
    state = running()
    if not state:
        print("serve: nothing to stop")
        return 0
    pid = state["pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while process_identity(pid) == state["process"]:
        if time.monotonic() > deadline:
            print(f"serve: process {pid} is still running after {STOP_S:.0f} s; logs: {FOLDER}", file=sys.stderr)
            return 1
        time.sleep(0.1)
    print("serve: stopped")
    return 0


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.serve", description="Serve Prefect, MLflow and the report on 127.0.0.1."
    )
    parser.add_argument("--stop", action="store_true", help="stop the running servers")
    parser.add_argument("--port", type=port_number, default=4200, help="port of Prefect's UI and API")
    parser.add_argument("--mlflow-port", type=port_number, default=5000, help="port of MLflow")
    parser.add_argument("--report-port", type=port_number, default=5001, help="port of the report")
    options = parser.parse_args()
    if options.stop:
        return stop()
    del options.stop
    return start(options)


if __name__ == "__main__":
    sys.exit(main())
