"""What DVC knows of a stage: its entry in dvc.yaml and dvc.lock, the hashes of what goes in and comes out, what it came after.

Hashes of files and folders are DVC's own (`md5` in dvc.lock), so that MLflow, dvc.lock, the cache and a remote have one name for
the same bytes.
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

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
IGNORED_FOLDER, IGNORED_SUFFIXES = "__pycache__", (".pyc", ".partial")
"""What .dvcignore keeps out of folders' hashes."""


def stage_entry(root: Path, name: str, domain: str | None) -> dict[str, Any]:
    """This stage's entry in dvc.yaml with `${item.domain}` filled in; {} where there is none (a stage run by hand)."""
    path = root / "dvc.yaml"
    if not path.exists():
        return {}
    entry = yaml.load(path.read_text(encoding="utf-8"), _LOADER).get("stages", {}).get(name, {})

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
    """MD5 of a file; read once per process as long as its size and time stay the same."""
    stat = path.stat()
    return _md5(str(path), stat.st_size, stat.st_mtime_ns)


def tracked_files(folder: Path) -> list[Path]:
    """All files below `folder` but those that .dvcignore names, in the order of their names."""
    files = (item for item in folder.rglob("*") if item.is_file() and item.suffix not in IGNORED_SUFFIXES)
    return sorted(item for item in files if IGNORED_FOLDER not in item.relative_to(folder).parts)


def dvc_hash(path: Path) -> str:
    """`md5` as dvc.lock has it: of a file's bytes; of a folder, over its files' names and hashes, with `.dir` behind."""
    if not path.is_dir():
        return file_hash(path)
    listed = [{"md5": file_hash(item), "relpath": item.relative_to(path).as_posix()} for item in tracked_files(path)]
    text = json.dumps(sorted(listed, key=lambda item: item["relpath"]), sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest() + ".dir"


def input_hashes(root: Path, name: str, domain: str | None) -> dict[str, str]:
    """Hash of every dependency that dvc.yaml lists for the stage and of its parameters; the stage's identity for resuming."""
    entry = stage_entry(root, name, domain)
    hashes = {dep: dvc_hash(root / dep) for dep in entry.get("deps", []) if (root / dep).exists()}
    values = yaml.load((root / "params.yaml").read_text(encoding="utf-8"), _LOADER)
    for key in entry.get("params", []):
        if isinstance(key, dict):  # a whole file
            hashes.update({f"params:{file}": dvc_hash(root / file) for file in key})
            continue
        node: Any = values
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        hashes[f"params:{key}"] = hashlib.sha256(repr(node).encode()).hexdigest()[:16]
    return hashes


def identity(hashes: Mapping[str, str]) -> str:
    """16 hex digits over `input_hashes`: what a stage was run on."""
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:16]


def output_hashes(root: Path, name: str, domain: str | None) -> dict[str, str]:
    """Hash of every output the stage has written."""
    outputs: list[str] = []
    entry = stage_entry(root, name, domain)
    for kind in ("outs", "metrics", "plots"):
        for item in entry.get(kind, []):
            outputs.extend([item] if isinstance(item, str) else item.keys())
    return {out: dvc_hash(root / out) for out in outputs if (root / out).exists()}


@dataclass(frozen=True)
class Locked:
    """A stage as dvc.lock has it: path -> hash of what went in and of what came out when DVC last saw it finish."""

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
    """Title -> stage, for all of dvc.lock but domains that are no longer listed; {} where there is no readable dvc.lock."""
    path = root / "dvc.lock"
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), _LOADER)["stages"]
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError):
        return {}

    def hashes(entry: Mapping[str, Any], kind: str) -> dict[str, str]:
        return {item["path"]: str(item.get("md5", "")) for item in entry.get(kind, [])}

    stages = [Locked(title, hashes(entry, "deps"), hashes(entry, "outs")) for title, entry in entries.items()]
    return {stage.title: stage for stage in stages if stage.domain is None or stage.domain in domains}


def _within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


def came_before(stages: Mapping[str, Locked], dependencies: Sequence[str]) -> list[Locked]:
    """The locked stages whose outputs `dependencies` lie in or hold, and what those came after in turn, in dvc.lock's order."""
    found: set[str] = set()
    waiting = list(dependencies)
    while waiting:
        path = waiting.pop()
        for stage in stages.values():
            if stage.title not in found and any(_within(path, out) or _within(out, path) for out in stage.outputs):
                found.add(stage.title)
                waiting.extend(stage.inputs)
    return [stage for stage in stages.values() if stage.title in found]
