"""MLflow as this project uses it: the only module that imports it, and only in processes that are not stages."""

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
from stages.tracking.place import ARTIFACTS, DATABASE, bring_up_to_date
from stages.tracking.spool import FOLDER

EXPERIMENT = "bellwether"
MAX_POINTS, MAX_ITEMS = 1000, 100
"""MLflow's limits per log_batch: points of curves, and parameters or tags."""
MAX_CHILDREN = 1000
DIGEST_CHARACTERS = 36
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
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
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
        with atomic_file(path) as partial:
            shutil.copyfile(new, partial)


class Server:
    """A connection to the tracking server, with the project's experiment and lifecycle runs."""

    def __init__(self, root: Path) -> None:
        """Connect. Raises whatever MLflow raises when the server does not answer."""
        import mlflow

        self.root = root
        self.local = not os.environ.get("MLFLOW_TRACKING_URI")
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / DATABASE}"
        self.mlflow = mlflow
        # Two stages that start together must not both create the database or the experiment; a client makes the database, too.
        with self.alone():
            if self.local:
                create_database(root / DATABASE, root / ARTIFACTS)
                former = bring_up_to_date(root)
                if former:
                    print(f"{root / DATABASE} was made elsewhere: runs' files are below {root / ARTIFACTS}, not {former}")
            mlflow.set_tracking_uri(self.uri)
            if self.local:
                os.environ.pop("MLFLOW_TRACKING_URI", None)  # set_tracking_uri wrote it; another root has another file
            self.client = mlflow.MlflowClient()
            self.experiment = self._experiment()

    def alone(self) -> Any:
        """A lock that one process of this checkout holds at a time: for looking first and making then."""
        return locked(self.root / FOLDER / "connect.lock", wait=True)

    def _experiment(self) -> str:
        found = self.client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)
            return found.experiment_id
        location = (self.root / ARTIFACTS).as_uri() if self.local else None
        # Else the UI takes traces for a sign that nothing is trained here, and hides the charts.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        return self.client.create_experiment(EXPERIMENT, artifact_location=location, tags=tags)

    def runs(self, at_most: int = MAX_CHILDREN, /, **tags: str) -> list[Any]:
        """Runs whose tags have these values (`__` in a name stands for a dot), oldest first."""
        parts = [f"tags.`{name.replace('__', '.')}` = '{value.replace(chr(39), '')}'" for name, value in tags.items()]
        return list(
            self.client.search_runs([self.experiment], " and ".join(parts), max_results=at_most, order_by=["start_time ASC"])
        )

    def running(self, host: str) -> list[Any]:
        """Runs of this machine that stand as RUNNING."""
        query = f"attributes.status = 'RUNNING' and tags.host = '{host}'"
        return list(self.client.search_runs([self.experiment], query, max_results=MAX_CHILDREN))

    def children(self, parent: str) -> list[Any]:
        """Runs below `parent`, oldest first."""
        return self.runs(mlflow__parentRunId=parent)

    def lifecycle(self, header: Mapping[str, Any]) -> str:
        """The parent run of a stage's run: found by the lifecycle's key, or made. The caller is `alone`."""
        found = self.runs(1, lifecycle=header["lifecycle"])
        if found:
            return str(found[0].info.run_id)
        tags = {**header["lifecycle_tags"], "lifecycle": header["lifecycle"], "mlflow.source.name": "dvc repro"}
        run_id = self._create(header["t"], header["lifecycle_name"], tags)
        self.batch(run_id, params=list(header["lifecycle_params"].items()))
        return run_id

    def stage_run(self, spool: str, header: Mapping[str, Any]) -> str | None:
        """The run of one stage: a child of its lifecycle's run, known by the name of its spool file.

        None for a stage that was not executed and of which the lifecycle has a run already.
        """
        with self.alone():
            found = self.runs(1, spool=spool)
            if found:
                return str(found[0].info.run_id)
            parent = self.lifecycle(header)
            if header["state"] != "ran" and self._known(parent, header):
                return None
            tags = {**header["tags"], "lifecycle.of": header["lifecycle"], "mlflow.parentRunId": parent, "spool": spool}
            run_id = self._create(header["t"], header["title"], tags)
        if header["state"] == "ran":
            self.client.update_run(parent, status="RUNNING")
        return run_id

    def _known(self, parent: str, header: Mapping[str, Any]) -> bool:
        """Whether `parent` has a run of this stage. One that was only known as cached learns its state."""
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
        """Send points (name, value, time in ms, step), parameters and tags; returns how many the server refused."""
        from mlflow.entities import Metric, Param, RunTag

        lost = 0
        metrics = [Metric(clean(name), value, t, step) for name, value, t, step in points]
        pairs = [Param(clean(key), value[:6000]) for key, value in params]
        labels = [RunTag(clean(key), value[:5000]) for key, value in tags]
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

    def headline(self, run_id: str, values: Mapping[str, float], t: int) -> None:
        """Metrics of the lifecycle that the stage's run belongs to."""
        parent = self.client.get_run(run_id).data.tags["mlflow.parentRunId"]
        self.batch(parent, [(name, value, t, 0) for name, value in values.items()])

    def inputs(self, run_id: str, event: Mapping[str, Any]) -> None:
        """Datasets of a run: name, DVC's hash as their digest, profile."""
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
            raise FileNotFoundError(f"artifact {path} is gone")
        if path.is_dir():
            self.client.log_artifacts(run_id, str(path), path.name)
        else:
            self.client.log_artifact(run_id, str(path))

    def end(self, run_id: str, status: str, ended_ms: int) -> None:
        """End a stage's run, and bring its lifecycle's state up to date."""
        self.client.set_terminated(run_id, status, end_time=ended_ms)
        parent = self.client.get_run(run_id).data.tags.get("mlflow.parentRunId")
        if parent:
            self.settle(parent, ended_ms)

    def settle(self, parent: str, now_ms: int) -> None:
        """A lifecycle runs while a stage of it does; else it is what its stages' last runs are: killed, failed or finished."""
        last = {run.info.run_name: run.info.status for run in self.children(parent)}
        status = next((state for state in ("RUNNING", "KILLED", "FAILED") if state in last.values()), "FINISHED")
        if status == "RUNNING":
            self.client.update_run(parent, status=status)
        else:
            self.client.set_terminated(parent, status, end_time=now_ms)
