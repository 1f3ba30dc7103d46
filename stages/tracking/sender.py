"""Sends spooled events to MLflow: the only module that imports it, and only in processes that are not stages.

Exactly once: points of curves, parameters, tags and files are idempotent on the server; runs, traces and model versions are
looked up by a tag of their own before they are made, whenever an earlier attempt may have got through.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.tracking.spool import FOLDER, Sent, Spool, locked

EXPERIMENT = "bellwether"
MAX_POINTS, MAX_ITEMS = 1000, 100
"""MLflow's limits per log_batch: points of curves, and parameters or tags."""
REFUSED = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "INVALID_STATE",
    "FEATURE_DISABLED",
}
"""Error codes that trying again cannot cure."""

for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}.items():
    os.environ.setdefault(_name, _value)
# MLflow would resume the run this names instead of making the stage's own.
os.environ.pop("MLFLOW_RUN_ID", None)


def clean(name: str) -> str:
    """`name` with only the characters that MLflow takes in keys."""
    return re.sub(r"[^\w.\- :/]", "_", name)[:250]


def refused(error: Exception) -> bool:
    """Whether trying again cannot help: the server said no, a file is gone, an event makes no sense."""
    return getattr(error, "error_code", None) in REFUSED or isinstance(
        error, (FileNotFoundError, KeyError, TypeError, ValueError)
    )


def create_database(path: Path, artifacts: Path) -> None:
    """Make MLflow's database at `path` unless it is there. The caller holds a lock.

    Made elsewhere and moved there whole, since MLflow does not repair tables that a killed process left half made; in memory
    where there is such a place, since the many small transactions take seconds on a disk.
    """
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else path.parent) as folder:
        new = Path(folder) / path.name
        SqlAlchemyStore(f"sqlite:///{new}", artifacts.as_uri()).engine.dispose()
        partial = path.with_suffix(".db.partial")
        shutil.copyfile(new, partial)
        os.replace(partial, path)


class Server:
    """A connection to the tracking server, with the project's experiment and lifecycle runs."""

    def __init__(self, root: Path) -> None:
        """Connect. Raises whatever MLflow raises when the server does not answer."""
        import mlflow

        self.root = root
        # Asked first: set_tracking_uri below writes this variable.
        self.local = not os.environ.get("MLFLOW_TRACKING_URI")
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"
        mlflow.set_tracking_uri(self.uri)
        self.mlflow = mlflow
        self.client = mlflow.MlflowClient()
        # Two stages that start together must not both create the database or the experiment.
        with locked(root / FOLDER / "connect.lock", wait=True):
            if self.local:
                create_database(root / "mlflow.db", root / "mlartifacts")
            self.experiment = self._experiment()

    def _experiment(self) -> str:
        found = self.client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)
            return found.experiment_id
        location = (self.root / "mlartifacts").as_uri() if self.local else None
        return self.client.create_experiment(EXPERIMENT, artifact_location=location)

    def find(self, tag: str, value: str) -> str | None:
        """Id of the oldest run whose tag has this value."""
        value = value.replace("'", "")
        runs = self.client.search_runs([self.experiment], f"tags.`{tag}` = '{value}'", max_results=1, order_by=["start_time ASC"])
        return runs[0].info.run_id if runs else None

    def lifecycle(self, header: dict[str, Any]) -> str:
        """The parent run of a stage's run: found by the lifecycle's key, or made."""
        with locked(self.root / FOLDER / "connect.lock", wait=True):
            run_id = self.find("lifecycle", header["lifecycle"])
            if run_id is None:
                tags = {key: header["tags"][key] for key in ("git.commit", "git.dirty", "params.hash")}
                name = f"lifecycle {header['tags']['git.commit'][:8]} {header['tags']['params.hash'][:8]}"
                run_id = self._create(header["t"], name, {**tags, "lifecycle": header["lifecycle"]})
                self.batch(run_id, params=list(header["lifecycle_params"].items()))
        return run_id

    def stage_run(self, spool: str, header: dict[str, Any]) -> str:
        """The run of one stage: a child of its lifecycle's run, known by the name of its spool file."""
        run_id = self.find("spool", spool)
        if run_id is None:
            parent = self.lifecycle(header)
            tags = {**header["tags"], "lifecycle.of": header["lifecycle"], "mlflow.parentRunId": parent, "spool": spool}
            run_id = self._create(header["t"], header["title"], tags)
            self.client.update_run(parent, status="RUNNING")
        return run_id

    def _create(self, started_ms: int, name: str, tags: dict[str, str]) -> str:
        source = {"mlflow.source.name": "bellwether", "mlflow.source.type": "JOB", "mlflow.source.git.commit": tags["git.commit"]}
        return self.client.create_run(self.experiment, start_time=started_ms, tags={**tags, **source}, run_name=name).info.run_id

    def batch(
        self,
        run_id: str,
        points: list[tuple[str, float, int, int]] | None = None,
        params: list[tuple[str, str]] | None = None,
        tags: list[tuple[str, str]] | None = None,
    ) -> int:
        """Send points (name, value, time in ms, step), parameters and tags; returns how many the server refused."""
        from mlflow.entities import Metric, Param, RunTag

        lost = 0
        metrics = [Metric(clean(name), value, t, step) for name, value, t, step in points or []]
        pairs = [Param(clean(key), value[:6000]) for key, value in params or []]
        labels = [RunTag(clean(key), value[:5000]) for key, value in tags or []]
        for kind, items, size in (("metrics", metrics, MAX_POINTS), ("params", pairs, MAX_ITEMS), ("tags", labels, MAX_ITEMS)):
            for start in range(0, len(items), size):
                lost += self._some(run_id, kind, items[start : start + size])
        return lost

    def _some(self, run_id: str, kind: str, items: list[Any]) -> int:
        """One log_batch; where it is refused, its items one at a time, so that one bad item costs nothing but itself."""
        try:
            self.client.log_batch(run_id, **{kind: items})
        except Exception as error:
            if not refused(error):
                raise
            if len(items) == 1:
                print(f"refused: {kind} {items[0]}: {error}", flush=True)
                return 1
            return sum(self._some(run_id, kind, [item]) for item in items)
        return 0

    def artifact(self, run_id: str, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"artifact {path} is gone")
        if path.is_dir():
            self.client.log_artifacts(run_id, str(path), path.name)
        else:
            self.client.log_artifact(run_id, str(path))

    def trace(self, run_id: str, event: dict[str, Any], key: str, doubt: bool) -> None:
        """One span per turn below a root span; the tag `event` names the spool's event."""
        if doubt and self.client.search_traces([self.experiment], filter_string=f"tags.event = '{key}'", max_results=1):
            return
        start_ns = event["t"] * 1_000_000
        root = self.mlflow.start_span_no_context(
            event["name"],
            span_type="AGENT",
            inputs={"turns": len(event["turns"])},
            tags={**event["tags"], "event": key},
            metadata={"mlflow.sourceRun": run_id},
            experiment_id=self.experiment,
            start_time_ns=start_ns,
        )
        for number, turn in enumerate(event["turns"]):
            outputs = {key: value for key, value in turn.items() if key != "action"}
            at = start_ns + number * 1_000_000
            span = self.mlflow.start_span_no_context(
                f"turn {number}", span_type="TOOL", parent_span=root, inputs={"action": turn.get("action")}, start_time_ns=at
            )
            span.end(outputs=outputs, end_time_ns=at + 1_000_000)
        root.end(outputs=dict(event["tags"]), end_time_ns=start_ns + max(len(event["turns"]), 1) * 1_000_000)

    def model(self, run_id: str, event: dict[str, Any]) -> None:
        """Log a model folder and register it as the newest version, alias champion."""
        name, folder = event["name"], Path(event["path"])
        self.artifact(run_id, folder)
        try:
            self.client.create_registered_model(name)
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{self.client.get_run(run_id).info.artifact_uri}/{folder.name}"
        versions = self.client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
        version = versions[0] if versions else self.client.create_model_version(name, source=source, run_id=run_id)
        self.client.set_registered_model_alias(name, "champion", version.version)

    def end(self, run_id: str, status: str, ended_ms: int) -> None:
        """End the stage's run, and its lifecycle's with the same status (until a next stage opens it again)."""
        self.client.set_terminated(run_id, status, end_time=ended_ms)
        parent = self.client.get_run(run_id).data.tags.get("mlflow.parentRunId")
        if parent:
            self.client.set_terminated(parent, status, end_time=ended_ms)


class Sender:
    """Sends one spool file; the caller holds the file's lock."""

    def __init__(self, server: Server, spool: Spool) -> None:
        self.server, self.spool = server, spool
        self.sent = spool.load_sent()

    def send(self) -> bool:
        """Send all whole events there are. True if the last one ends the run (the file is then removed).

        Raises what MLflow raises when the server does not answer; what was confirmed by then is remembered.
        """
        while True:
            events, after = self.spool.read(self.sent.offset)
            if not events:
                return False
            if not self.sent.run_id:
                header = events[0][1]
                if header["kind"] != "run":
                    self.spool.remove()
                    return True
                self.sent.run_id = self.server.stage_run(self.spool.path.stem, header)
                self.sent.rejected += self.server.batch(self.sent.run_id, params=list(header["params"].items()))
                self._confirm(events[1][0] if len(events) > 1 else after)
                continue
            if self._send_events(events, after):
                self.spool.remove()
                return True

    def _send_events(self, events: list[tuple[int, dict[str, Any]]], after: int) -> bool:
        """Batches of points, parameters and tags, cut where something else comes; True when the run has ended."""
        waiting: list[dict[str, Any]] = []
        for index, (_, event) in enumerate(events):
            following = events[index + 1][0] if index + 1 < len(events) else after
            if event["kind"] in ("metric", "params", "tags", "torn"):
                waiting.append(event)
                if len(waiting) < MAX_POINTS and index + 1 < len(events):
                    continue
            self._flush(waiting)
            if event["kind"] not in ("metric", "params", "tags", "torn"):
                self._one(event, f"{self.spool.path.stem}:{events[index][0]}")
            waiting = []
            self._confirm(following)
            if event["kind"] == "end":
                return True
        return False

    def _flush(self, events: list[dict[str, Any]]) -> None:
        points = [(event["name"], event["value"], event["t"], event["step"]) for event in events if event["kind"] == "metric"]
        params = [pair for event in events if event["kind"] == "params" for pair in event["values"].items()]
        tags = {key: value for event in events if event["kind"] == "tags" for key, value in event["values"].items()}
        self.sent.rejected += self.server.batch(self.sent.run_id, points, params, list(tags.items()))
        self.sent.rejected += sum(event["kind"] == "torn" for event in events)

    def _one(self, event: dict[str, Any], key: str) -> None:
        """An event that is sent by itself. One that is refused for good is reported and passed over."""
        run_id, doubt = self.sent.run_id, self.sent.doubt
        self.sent.doubt = True
        self.spool.save_sent(self.sent)
        actions: dict[str, Callable[[], None]] = {
            "artifact": lambda: self.server.artifact(run_id, Path(event["path"])),
            "trace": lambda: self.server.trace(run_id, event, key, doubt),
            "model": lambda: self.server.model(run_id, event),
            "end": lambda: self._end(event),
        }
        try:
            actions[event["kind"]]()
        except Exception as error:
            if not refused(error):
                raise
            print(f"refused: {event['kind']}: {error}", flush=True)
            self.sent.rejected += 1

    def _end(self, event: dict[str, Any]) -> None:
        if self.sent.rejected:
            self.server.batch(self.sent.run_id, tags=[("tracking.rejected", str(self.sent.rejected))])
        self.server.end(self.sent.run_id, event["status"], event["t"])

    def _confirm(self, offset: int) -> None:
        self.sent = Sent(self.sent.run_id, offset, False, self.sent.rejected)
        self.spool.save_sent(self.sent)
