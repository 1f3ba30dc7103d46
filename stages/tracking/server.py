"""The MLflow client: the only module that imports mlflow; stages themselves never load it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_file, locked
from stages.tracking.spool import FOLDER
from stages.tracking.store import ARTIFACTS, DATABASE, relocate

EXPERIMENT = "bellwether"
MAX_POINTS, MAX_ITEMS = 1000, 100
"""MLflow's limits per log_batch: metric points, and parameters or tags."""
MAX_CHILDREN = 1000
DIGEST_CHARACTERS = 36
PERMANENT = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "INVALID_STATE",
    "FEATURE_DISABLED",
}
"""Error codes for which a retry is pointless."""

for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}.items():
    os.environ.setdefault(_name, _value)
# MLflow would resume this run instead of creating a new one.
os.environ.pop("MLFLOW_RUN_ID", None)


def clean(name: str) -> str:
    """`name` with only the characters that MLflow allows in keys."""
    return re.sub(r"[^\w.\- :/]", "_", name)[:250]


def permanent(error: Exception) -> bool:
    """Whether a retry is pointless: the server rejected the event, a file is missing, the event is malformed."""
    return getattr(error, "error_code", None) in PERMANENT or isinstance(
        error, (FileNotFoundError, KeyError, TypeError, ValueError)
    )


def create_database(path: Path, artifacts: Path) -> None:
    """Create MLflow's database at `path` unless it exists. The caller holds a lock.

    Created elsewhere and moved, since MLflow does not repair half-created tables; in /dev/shm if possible, since the many small
    transactions take seconds on disk.
    """
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else path.parent) as folder:
        new = Path(folder) / path.name
        SqlAlchemyStore(f"sqlite:///{new}", artifacts.as_uri()).engine.dispose()
        with atomic_file(path) as partial:
            shutil.copyfile(new, partial)


class Server:
    """A connection to the tracking server, with the project's experiment and lifecycle runs."""

    def __init__(self, root: Path) -> None:
        """Connect. Raises what MLflow raises if the server is unreachable."""
        import mlflow

        self.root = root
        self.local = not os.environ.get("MLFLOW_TRACKING_URI")
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / DATABASE}"
        self.mlflow = mlflow
        # Stages that start together must not both create the database or the experiment.
        with self.lock():
            if self.local:
                create_database(root / DATABASE, root / ARTIFACTS)
                former = relocate(root)
                if former:
                    print(f"{root / DATABASE} was copied or moved: artifacts are in {root / ARTIFACTS}, no longer in {former}")
            mlflow.set_tracking_uri(self.uri)
            if self.local:
                os.environ.pop("MLFLOW_TRACKING_URI", None)  # set_tracking_uri wrote it; another root has another file
            self.client = mlflow.MlflowClient()
            self.experiment = self._experiment()

    def lock(self) -> Any:
        """The checkout-wide lock for looking something up and then creating it."""
        return locked(self.root / FOLDER / "connect.lock", wait=True)

    def _experiment(self) -> str:
        found = self.client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)
            return found.experiment_id
        location = (self.root / ARTIFACTS).as_uri() if self.local else None
        # Otherwise the UI takes an experiment with traces for a GenAI one and hides the charts.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        return self.client.create_experiment(EXPERIMENT, artifact_location=location, tags=tags)

    def runs(self, at_most: int = MAX_CHILDREN, /, **tags: str) -> list[Any]:
        """Runs whose tags have these values (`__` in a name means a dot), oldest first."""
        parts = [f"tags.`{name.replace('__', '.')}` = '{value.replace(chr(39), '')}'" for name, value in tags.items()]
        return list(
            self.client.search_runs([self.experiment], " and ".join(parts), max_results=at_most, order_by=["start_time ASC"])
        )

    def running(self, host: str) -> list[Any]:
        """RUNNING runs of this machine."""
        query = f"attributes.status = 'RUNNING' and tags.host = '{host}'"
        return list(self.client.search_runs([self.experiment], query, max_results=MAX_CHILDREN))

    def children(self, parent: str) -> list[Any]:
        """Runs below `parent`, oldest first."""
        return self.runs(mlflow__parentRunId=parent)

    def lifecycle(self, header: Mapping[str, Any]) -> str:
        """Find (by the lifecycle's key) or create the parent run. The caller holds the lock."""
        found = self.runs(1, lifecycle=header["lifecycle"])
        if found:
            return str(found[0].info.run_id)
        tags = {**header["lifecycle_tags"], "lifecycle": header["lifecycle"], "mlflow.source.name": "dvc repro"}
        run_id = self._create(header["t"], header["lifecycle_name"], tags)
        self.batch(run_id, params=list(header["lifecycle_params"].items()))
        return run_id

    def stage_run(self, spool: str, header: Mapping[str, Any]) -> str | None:
        """Find (by spool file name) or create the run of one stage, a child of its lifecycle's run.

        None for a stage that was not executed and already has a run in the lifecycle.
        """
        with self.lock():
            found = self.runs(1, spool=spool)
            if found:
                return str(found[0].info.run_id)
            parent = self.lifecycle(header)
            if header["state"] != "ran" and self._has_run(parent, header):
                return None
            tags = {**header["tags"], "lifecycle.of": header["lifecycle"], "mlflow.parentRunId": parent, "spool": spool}
            run_id = self._create(header["t"], header["title"], tags)
        if header["state"] == "ran":
            self.client.update_run(parent, status="RUNNING")
        return run_id

    def _has_run(self, parent: str, header: Mapping[str, Any]) -> bool:
        """Whether `parent` has a run of this stage. Refines the state of a run tagged `cached`."""
        same = [run for run in self.children(parent) if run.info.run_name == header["title"]]
        for run in same:
            if run.data.tags.get("dvc.state") == "cached" and header["state"] != "cached":
                self.client.set_tag(run.info.run_id, "dvc.state", header["state"])
        return bool(same)

    def _create(self, started_ms: int, name: str, tags: Mapping[str, str]) -> str:
        source = {"mlflow.source.type": "JOB", "mlflow.source.git.commit": tags["git.commit"]}
        run = self.client.create_run(self.experiment, start_time=started_ms, tags={**tags, **source}, run_name=name)
        return str(run.info.run_id)

    def batch(
        self,
        run_id: str,
        points: Sequence[tuple[str, float, int, int]] = (),
        params: Sequence[tuple[str, str]] = (),
        tags: Sequence[tuple[str, str]] = (),
    ) -> int:
        """Send points (name, value, time in ms, step), parameters and tags; returns how many were rejected."""
        from mlflow.entities import Metric, Param, RunTag

        rejected = 0
        metrics = [Metric(clean(name), value, t, step) for name, value, t, step in points]
        pairs = [Param(clean(key), value[:6000]) for key, value in params]
        labels = [RunTag(clean(key), value[:5000]) for key, value in tags]
        for kind, items, size in (("metrics", metrics, MAX_POINTS), ("params", pairs, MAX_ITEMS), ("tags", labels, MAX_ITEMS)):
            for start in range(0, len(items), size):
                rejected += self._log(run_id, kind, items[start : start + size])
        return rejected

    def _log(self, run_id: str, kind: str, items: list[Any]) -> int:
        """One log_batch; if it is rejected, log its items one by one. Returns how many were rejected."""
        try:
            self.client.log_batch(run_id, **{kind: items})
        except Exception as error:
            if not permanent(error):
                raise
            if len(items) == 1:
                print(f"rejected: {kind} {items[0]}: {error}", flush=True)
                return 1
            return sum(self._log(run_id, kind, [item]) for item in items)
        return 0

    def headline(self, run_id: str, values: Mapping[str, float], t: int) -> None:
        """Log metrics to the parent (lifecycle) run."""
        parent = self.client.get_run(run_id).data.tags["mlflow.parentRunId"]
        self.batch(parent, [(name, value, t, 0) for name, value in values.items()])

    def inputs(self, run_id: str, event: Mapping[str, Any]) -> None:
        """Log the datasets of a run: name, DVC hash as digest, profile."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        given = []
        for item in event["datasets"]:
            source = json.dumps({"uri": item["name"]})
            digest = item["digest"][:DIGEST_CHARACTERS]
            dataset = Dataset(item["name"], digest, "local", source, profile=json.dumps(item["profile"]))
            given.append(DatasetInput(dataset, [InputTag("mlflow.data.context", event["context"])]))
        if given:
            self.client.log_inputs(run_id, datasets=given)

    def artifact(self, run_id: str, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"artifact {path} does not exist")
        if path.is_dir():
            self.client.log_artifacts(run_id, str(path), path.name)
        else:
            self.client.log_artifact(run_id, str(path))

    def end(self, run_id: str, status: str, ended_ms: int) -> None:
        """End a stage's run and update the status of its lifecycle."""
        self.client.set_terminated(run_id, status, end_time=ended_ms)
        parent = self.client.get_run(run_id).data.tags.get("mlflow.parentRunId")
        if parent:
            self.update_status(parent, ended_ms)

    def update_status(self, parent: str, now_ms: int) -> None:
        """Set a lifecycle's status from the latest run of each stage: RUNNING, else KILLED, else FAILED, else FINISHED."""
        last = {run.info.run_name: run.info.status for run in self.children(parent)}
        status = next((state for state in ("RUNNING", "KILLED", "FAILED") if state in last.values()), "FINISHED")
        if status == "RUNNING":
            self.client.update_run(parent, status=status)
        else:
            self.client.set_terminated(parent, status, end_time=now_ms)
