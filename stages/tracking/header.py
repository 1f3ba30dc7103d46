"""The header of a stage's run: names, tags and parameters, captured when the stage starts so it can be sent at any time."""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.params import Params
from stages.records.sections import params_hash
from stages.runtime.git import GitError, git
from stages.runtime.process import process_identity
from stages.tracking.spool import server_key

STATES = ("ran", "restored", "unchanged", "cached")
"""Tag `dvc.state`: executed; restored from DVC's run cache; already up to date; not executed (restored or unchanged)."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command; None without git or a repository."""
    try:
        return git(root, *arguments, timeout=5).strip()
    except GitError:
        return None


def git_state(root: Path) -> tuple[str, bool]:
    """(commit, whether tracked files differ from it, except those that the pipeline writes)."""
    commit = _git(root, "rev-parse", "HEAD") or "none"
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!dvc.lock", ":!reports")
    return commit, bool(changed)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container user without a name
        return str(os.getuid())


@dataclass(frozen=True)
class Lifecycle:
    """The parent run: one per flow run, DVC experiment, or commit and parameters."""

    root: Path
    key: str
    name: str
    tags: Mapping[str, str]
    params: Params

    @classmethod
    def now(cls, root: Path, params: Params) -> Lifecycle:
        """The current lifecycle: LIFECYCLE_RUN_ID if set by a flow, else a hash of commit, parameters and DVC_EXP_NAME."""
        commit, dirty = git_state(root)
        digest = params_hash(params)
        experiment = os.environ.get("DVC_EXP_NAME", "")
        default_key = hashlib.sha256(" ".join(filter(None, [commit, digest, experiment])).encode()).hexdigest()[:16]
        title = os.environ.get("LIFECYCLE_RUN_NAME") or experiment or f"{commit[:8]} {digest[:8]}"
        tags = {
            "git.commit": commit,
            "git.dirty": str(dirty).lower(),
            "params.hash": digest,
            "host": socket.gethostname(),
            "checkout": str(root),
            "mlflow.user": _user(),
        }
        if experiment:
            tags["dvc.exp"] = experiment
        return cls(root, os.environ.get("LIFECYCLE_RUN_ID") or default_key, f"lifecycle {title}", tags, params)

    def header(self, name: str, domain: str | None, state: str = "ran") -> dict[str, Any]:
        """The first event of a stage's run: name, tags and parameters of the run and of its lifecycle."""
        params = self.params
        values: dict[str, Any] = {"seed": params.seed, "model": params.model, "resources": params.resources}
        if domain and hasattr(params.per_domain[domain], name):
            values[name] = params.section(name, domain)
            values["environment"] = params.per_domain[domain].environment
        elif hasattr(params, name):
            values[name] = getattr(params, name)
        own = {key: value.model_dump(mode="json") if hasattr(value, "model_dump") else value for key, value in values.items()}
        argument = f" --domain {domain}" if domain else ""
        return {
            "kind": "run",
            "title": f"{name}@{domain}" if domain else name,
            "root": str(self.root),
            "server": server_key(),
            "pid": os.getpid(),
            "process": process_identity(os.getpid()),
            "state": state,
            "lifecycle": self.key,
            "lifecycle_name": self.name,
            "tags": {
                **self.tags,
                "stage": name,
                "domain": domain or "all",
                "dvc.state": state,
                "pid": str(os.getpid()),
                "mlflow.source.name": f"python -m stages.{name}{argument}",
            },
            "lifecycle_tags": dict(self.tags),
            "params": {key: str(value) for key, value in flatten(own).items()},
            "lifecycle_params": {key: str(value) for key, value in flatten(params.model_dump(mode="json")).items()},
        }
