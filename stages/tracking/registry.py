"""Versions of the registered model and the alias `champion`.

A version holds no weights but a DVC file (`merged.dvc`) and the evaluation rows for the comparison. The alias moves to a version
that passes the paired test (stages/evaluation/promotion.py); the version's tag `champion.decision` holds the reasons.
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
"""The model to beat while there is no champion."""


def number(version: Any) -> int:
    """The version number, which MLflow returns as text or as a number."""
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
    """All versions, oldest first; [] if the model was never registered."""
    found = server.client.search_model_versions(f"name = '{name}'", max_results=10_000)
    return sorted(found, key=number)


def rows_path(server: Server, version: Any, folder: Path) -> Path:
    """The version's evaluation rows, downloaded into `folder`."""
    artifact = f"{version.source.rstrip('/')}/{ROWS}"
    return Path(server.mlflow.artifacts.download_artifacts(artifact_uri=artifact, dst_path=str(folder)))


def challenge(server: Server, name: str, version: Any, settings: Mapping[str, Any]) -> Decision:
    """Compare `version` with the champion, move the alias if it is better, and tag the version with the decision."""
    holder = champion(server, name)
    if holder is not None and number(holder) == number(version):
        return Decision(False, (f"version {version.version} is the champion",))
    if holder is not None and holder.tags.get("sampling") != version.tags.get("sampling"):
        line = (
            f"not promoted: sampling settings differ from those of champion version {holder.version} "
            f"({version.tags.get('sampling')} vs. {holder.tags.get('sampling')}), so the two cannot be compared"
        )
        return _tag(server, name, version, Decision(False, (line,)))
    with tempfile.TemporaryDirectory() as folder:
        rows = read_rows(rows_path(server, version, Path(folder) / "challenger"))
        if holder is None:
            other, label = rows_of(rows, FIRST_HOLDER), FIRST_HOLDER
        else:
            theirs = read_rows(rows_path(server, holder, Path(folder) / "holder"))
            other, label = rows_of(theirs, holder.tags["model"]), f"champion version {holder.version}"
    decision = decide(rows_of(rows, version.tags["model"]), other, label, settings)
    if decision.promoted:
        server.client.set_registered_model_alias(name, ALIAS, str(version.version))
    return _tag(server, name, version, decision)


def _tag(server: Server, name: str, version: Any, decision: Decision) -> Decision:
    server.client.set_model_version_tag(name, str(version.version), "champion.decision", "; ".join(decision.lines)[:5000])
    return decision


def retire(server: Server, name: str) -> Any | None:
    """Remove the alias; returns the version that held it."""
    holder = champion(server, name)
    if holder is not None:
        server.client.delete_registered_model_alias(name, ALIAS)
    return holder


def register(server: Server, run_id: str, event: Mapping[str, Any], files: Path) -> None:
    """Create a version for the model in `event`, unless one with the same hash, panels and sampling exists, and let it challenge
    the champion."""
    name, settings = event["name"], event["settings"]
    server.client.log_artifacts(run_id, str(files / MODEL_FILES), MODEL_FILES)
    rows = rows_of(read_rows(files / MODEL_FILES / ROWS), settings["model"])
    played = {
        "panels": " ".join(f"{domain}:{panel}" for domain, panel in panels_of(rows).items()),
        "sampling": json.dumps(settings["sampling"], sort_keys=True),
    }
    with server.lock():
        try:
            server.client.create_registered_model(name)
        except server.mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        wanted = {"dvc.md5": event["md5"], **played}
        same = [version for version in versions(server, name) if wanted.items() <= version.tags.items()]
        version = same[0] if same else _create(server, run_id, event, played)
        server.client.set_tag(run_id, "model.version", f"{name}/{version.version}")
        decision = challenge(server, name, version, settings)
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
    text = f"`{event['path']}`, DVC hash `{event['md5']}`. The weights are in DVC's cache or remote; see docs/mlflow.md."
    return server.client.create_model_version(event["name"], source=source, run_id=run_id, tags=tags, description=text)
