"""`make serve` running in a checkout."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 900.0
"""Timeout for what always happens, however busy the machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
    """Poll `condition` until it is true, and return its value."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"timed out after {within_s:.0f} s: {what}")


def existing(deployments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Deployments whose flow exists in this checkout."""
    return [item for item in deployments if (ROOT / item["entrypoint"].split(":")[0]).exists()]


def add_flows(root: Path) -> None:
    """Copy this checkout's flows and prefect.yaml into a DVC project; the nightly run is scheduled every minute."""
    shutil.copytree(ROOT / "flows", root / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "reports" / "benchmarks", root / "reports")
    settings = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    settings["deployments"] = existing(settings["deployments"])
    for item in settings["deployments"]:
        if item["name"] == "lifecycle-nightly":
            item["schedules"] = [{"cron": "* * * * *", "timezone": "UTC", "slug": "nightly"}]
        for schedule in item.get("schedules", []) if item["name"] != "lifecycle-nightly" else []:
            schedule["active"] = False
    (root / "prefect.yaml").write_text(yaml.safe_dump(settings))


@dataclass
class Served:
    """A running `make serve` in `root`."""

    root: Path
    process: subprocess.Popen
    environment: dict[str, str]
    port: int
    mlflow_port: int
    report_port: int

    @classmethod
    def start(cls, root: Path) -> Served:
        """Start it in `root`, which has flows and prefect.yaml."""
        port, mlflow, report = free_port(), free_port(), free_port()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "DVC_"))}
        environment = {**environment, "PREFECT_HOME": str(root / ".prefect"), "PYTHONPATH": str(root), "SERVED_BY": str(root)}
        ports = ["--port", str(port), "--mlflow-port", str(mlflow), "--report-port", str(report)]
        with (root / "serve.log").open("w") as log:
            command = [sys.executable, "-m", "flows.serve", *ports]
            process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)
        served = cls(root, process, environment, port, mlflow, report)
        until(served.is_up, "make serve is up")
        return served

    def is_up(self) -> bool:
        text = (self.root / "serve.log").read_text()
        assert self.process.poll() is None, text
        return "stops everything" in text

    def processes(self) -> list[psutil.Process]:
        """All processes that `make serve` and its services have started, identified by their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SERVED_BY") == str(self.root) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    @property
    def auth(self) -> tuple[str, str]:
        """User and password of Prefect's API."""
        user, _, password = (self.root / ".prefect" / "auth").read_text().strip().partition(":")
        return user, password

    def api(self, method: str, path: str, **values: Any) -> Any:
        address = f"http://127.0.0.1:{self.port}/api"
        with httpx.Client(base_url=address, timeout=WAIT_S, trust_env=False, auth=self.auth) as client:
            # 503: the database is locked by a writer; Prefect's own client retries as well
            answer = until(lambda: (found := client.request(method, path, **values)).status_code != 503 and found, path)
            answer.raise_for_status()
            return answer.json() if answer.content else None

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        wanted = {"deployments": {"name": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return self.api("POST", "/flow_runs/filter", json=wanted)

    def deployment(self, name: str) -> dict[str, Any]:
        return self.api("GET", f"/deployments/name/lifecycle/{name}")

    def run(self, name: str, **settings: Any) -> str:
        """Create a run of a deployment of the lifecycle and return its id. Raises httpx.HTTPStatusError if the server rejects
        it."""
        parameters = {"settings": settings}
        path = f"/deployments/{self.deployment(name)['id']}/create_flow_run"
        return self.api("POST", path, json={"parameters": parameters, "state": {"type": "SCHEDULED"}})["id"]

    def state(self, run: str) -> dict[str, Any]:
        return self.api("GET", f"/flow_runs/{run}")["state"]

    def end_of(self, run: str, within_s: float = WAIT_S) -> dict[str, Any]:
        """Wait until a run has ended, and return its state."""
        ends = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        return until(lambda: (state := self.state(run))["type"] in ends and state, f"the end of run {run}", within_s)

    def tasks(self, run: str) -> dict[str, dict[str, Any]]:
        """Stage -> its task run."""
        found = self.api("POST", "/task_runs/filter", json={"flow_runs": {"id": {"any_": [run]}}})
        return {item["name"]: item for item in found}

    def artifacts(self, run: str) -> dict[str, dict[str, Any]]:
        found = self.api("POST", "/artifacts/filter", json={"artifacts": {"flow_run_id": {"any_": [run]}}})
        return {item["key"]: item for item in found}

    def stop(self) -> str:
        """Run `make serve-stop` and return its output."""
        command = [sys.executable, "-m", "flows.serve", "--stop"]
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def kill(self) -> None:
        """Clean up after a failed test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(WAIT_S)
        for process in self.processes():
            process.kill()
