"""A stage in DVC: its entries in dvc.yaml and dvc.lock, the hashes of its inputs and outputs, and the stages before it.

Hashes are DVC's own (`md5` in dvc.lock), so that MLflow, dvc.lock, the cache and a remote agree on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from stages.runtime.yaml_files import read_yaml, value_at

TRANSFER = "transfer"
"""The stage whose domains are those of evaluate.transfer; others' are `domains`."""
IGNORED_FOLDER, IGNORED_SUFFIXES = "__pycache__", (".pyc", ".partial")
"""What .dvcignore excludes from folders' hashes."""


def stage_entry(root: Path, name: str, domain: str | None) -> dict[str, Any]:
    """The stage's entry in dvc.yaml with `${item.domain}` filled in; {} if there is none."""
    path = root / "dvc.yaml"
    if not path.exists():
        return {}
    entry = read_yaml(path).get("stages", {}).get(name, {})

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("${item.domain}", domain or "")
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, dict):
            return {fill(key): fill(item) for key, item in value.items()}
        return value

    return fill(entry)


@lru_cache(maxsize=100_000)
def _md5(path: str, size: int, changed_ns: int) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def file_hash(path: Path) -> str:
    """MD5 of a file, cached until its size or modification time changes."""
    stat = path.stat()
    return _md5(str(path), stat.st_size, stat.st_mtime_ns)


def tracked_files(folder: Path) -> list[Path]:
    """All files below `folder` except those in .dvcignore, sorted."""
    files = (item for item in folder.rglob("*") if item.is_file() and item.suffix not in IGNORED_SUFFIXES)
    return sorted(item for item in files if IGNORED_FOLDER not in item.relative_to(folder).parts)


def dvc_hash(path: Path) -> str:
    """`md5` as in dvc.lock: of a file's bytes, or of a folder's file names and hashes with the suffix `.dir`."""
    if not path.is_dir():
        return file_hash(path)
    listed = [{"md5": file_hash(item), "relpath": item.relative_to(path).as_posix()} for item in tracked_files(path)]
    text = json.dumps(sorted(listed, key=lambda item: item["relpath"]), sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest() + ".dir"


CODE = "stages"
"""The folder of the stages' code."""


def input_hashes(root: Path, name: str, domain: str | None, only_edited: bool = False) -> dict[str, str]:
    """Hashes of the stage's dependencies and parameters in dvc.yaml: its identity for resuming. only_edited: of its code and
    parameters, which people edit while it runs."""
    entry = stage_entry(root, name, domain)
    listed = [dep for dep in entry.get("deps", []) if not only_edited or dep.split("/")[0] == CODE]
    hashes = {dep: dvc_hash(root / dep) for dep in listed if (root / dep).exists()}
    values = read_yaml(root / "params.yaml") if "params" in entry else {}
    for key in entry.get("params", []):
        if isinstance(key, dict):  # an entire file
            hashes.update({f"params:{file}": dvc_hash(root / file) for file in key})
            continue
        hashes[f"params:{key}"] = hashlib.sha256(repr(value_at(values, key)).encode()).hexdigest()[:16]
    return hashes


def identity(hashes: Mapping[str, str]) -> str:
    """16 hex digits that identify a stage's inputs (`input_hashes`)."""
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:16]


def output_hashes(root: Path, name: str, domain: str | None) -> dict[str, str]:
    """Hashes of the outputs that the stage has written."""
    outputs: list[str] = []
    entry = stage_entry(root, name, domain)
    for kind in ("outs", "metrics", "plots"):
        for item in entry.get(kind, []):
            outputs.extend([item] if isinstance(item, str) else item.keys())
    return {out: dvc_hash(root / out) for out in outputs if (root / out).exists()}


@dataclass(frozen=True)
class Locked:
    """A stage in dvc.lock: path -> hash of its inputs and outputs when it last finished."""

    title: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.title.partition("@")[0]

    @property
    def domain(self) -> str | None:
        return self.title.partition("@")[2] or None


def locked_stages(root: Path, domains: Sequence[str]) -> dict[str, Locked]:
    """Title -> stage in dvc.lock, except for unlisted domains; {} without a readable dvc.lock."""

    def hashes(entry: Mapping[str, Any], kind: str) -> dict[str, str]:
        return {item["path"]: str(item.get("md5", "")) for item in entry.get(kind, [])}

    try:
        entries = read_yaml(root / "dvc.lock")["stages"]
        stages = [Locked(title, hashes(entry, "deps"), hashes(entry, "outs")) for title, entry in entries.items()]
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, AttributeError):  # DVC may be writing it, in place
        return {}
    return {stage.title: stage for stage in stages if stage.domain is None or stage.domain in domains}


def _within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


def came_before(stages: Mapping[str, Locked], dependencies: Sequence[str]) -> list[Locked]:
    """The locked stages whose outputs overlap `dependencies`, and the stages before them in turn, in dvc.lock's order."""
    found: set[str] = set()
    waiting = list(dependencies)
    while waiting:
        path = waiting.pop()
        for stage in stages.values():
            if stage.title not in found and any(_within(path, out) or _within(out, path) for out in stage.outputs):
                found.add(stage.title)
                waiting.extend(stage.inputs)
    return [stage for stage in stages.values() if stage.title in found]
