"""Versions of the registered model and the alias `champion`.

A version holds no weights: its files are a DVC pointer (`merged.dvc`) and the evaluation rows that it is judged by. The alias
moves when the paired test says so (promotion.py), and what was decided stands in the version's tag `champion.decision`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.evaluation.promotion import Decision, decide, panels_of, rows_of
from stages.records.episode import read_rows
from stages.tracking import MODEL_FILES, ROWS
from stages.tracking.server import Server

ALIAS = "champion"
FIRST_HOLDER = "sft"
"""Whom a model has to beat where there is no champion."""


def number(version: Any) -> int:
    """MLflow gives it as text or as a number."""
    return int(version.version)


def champion(server: Server, name: str) -> Any | None:
    """The version that holds the alias, if there is one."""
    try:
        return server.client.get_model_version_by_alias(name, ALIAS)
    except server.mlflow.MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def versions(server: Server, name: str) -> list[Any]:
    """All versions, oldest first; [] for a model that was never registered."""
    found = server.client.search_model_versions(f"name = '{name}'", max_results=10_000)
    return sorted(found, key=number)


def rows_path(server: Server, version: Any, folder: Path) -> Path:
    """The version's evaluation rows, downloaded into `folder`."""
    artifact = f"{version.source.rstrip('/')}/{ROWS}"
    return Path(server.mlflow.artifacts.download_artifacts(artifact_uri=artifact, dst_path=str(folder)))


def judge(server: Server, name: str, version: Any, settings: Mapping[str, Any]) -> Decision:
    """Hold `version` against the champion and move the alias if it is better; the decision is kept as a tag of the version."""
    holder = champion(server, name)
    if holder is not None and number(holder) == number(version):
        return Decision(False, (f"version {version.version} is the champion",))
    if holder is not None and holder.tags.get("sampling") != version.tags.get("sampling"):
        told = f"({version.tags.get('sampling')} here, {holder.tags.get('sampling')} there)"
        line = f"not promoted: champion version {holder.version} played with other sampling {told}, so the two cannot be compared"
        return _tell(server, name, version, Decision(False, (line,)))
    with tempfile.TemporaryDirectory() as folder:
        rows = read_rows(rows_path(server, version, Path(folder) / "challenger"))
        if holder is None:
            other, called = rows_of(rows, FIRST_HOLDER), f"{FIRST_HOLDER}, its own start"
        else:
            theirs = read_rows(rows_path(server, holder, Path(folder) / "holder"))
            other, called = rows_of(theirs, holder.tags["model"]), f"champion version {holder.version}"
    decision = decide(rows_of(rows, version.tags["model"]), other, called, settings)
    if decision.promoted:
        server.client.set_registered_model_alias(name, ALIAS, str(version.version))
    return _tell(server, name, version, decision)


def _tell(server: Server, name: str, version: Any, decision: Decision) -> Decision:
    server.client.set_model_version_tag(name, str(version.version), "champion.decision", "; ".join(decision.lines)[:5000])
    return decision


def retire(server: Server, name: str) -> Any | None:
    """Take the alias off; returns the version that held it."""
    holder = champion(server, name)
    if holder is not None:
        server.client.delete_registered_model_alias(name, ALIAS)
    return holder


def register(server: Server, run_id: str, event: Mapping[str, Any], files: Path) -> None:
    """Make a version of the model that the event points to, unless these bytes have one from the same panels, and judge it."""
    name, settings = event["name"], event["settings"]
    server.client.log_artifacts(run_id, str(files / MODEL_FILES), MODEL_FILES)
    rows = rows_of(read_rows(files / MODEL_FILES / ROWS), settings["model"])
    played = {
        "panels": " ".join(f"{domain}:{panel}" for domain, panel in panels_of(rows).items()),
        "sampling": json.dumps(settings["sampling"], sort_keys=True),
    }
    with server.alone():
        try:
            server.client.create_registered_model(name)
        except server.mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        wanted = {"dvc.md5": event["md5"], **played}
        same = [version for version in versions(server, name) if wanted.items() <= version.tags.items()]
        version = same[0] if same else _create(server, run_id, event, played)
        server.client.set_tag(run_id, "model.version", f"{name}/{version.version}")
        decision = judge(server, name, version, settings)
        server.client.set_tag(run_id, "champion.decision", decision.conclusion)


def _create(server: Server, run_id: str, event: Mapping[str, Any], played: Mapping[str, str]) -> Any:
    run = server.client.get_run(run_id)
    tags = {
        "dvc.path": event["path"],
        "dvc.md5": event["md5"],
        **played,
        "model": event["settings"]["model"],
        **{key: run.data.tags[key] for key in ("git.commit", "params.hash") if key in run.data.tags},
    }
    source = f"{run.info.artifact_uri}/{MODEL_FILES}"
    text = f"`{event['path']}`, DVC hash `{event['md5']}`. DVC's cache and remotes hold the weights; see docs/mlflow.md."
    return server.client.create_model_version(event["name"], source=source, run_id=run_id, tags=tags, description=text)
