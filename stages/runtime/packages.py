"""Records which outside packages and which files named in params.yaml a domain's stages use, with hashes, so that DVC sees
changes.

`python -m stages.runtime.packages` writes, for every NAME of `domains` and `evaluate.transfer` in params.yaml,
data/packages/environments/NAME.json, the package of the domain (entry points of the group bellwether.domains) and the files and
folders below data/raw that its settings name, and data/packages/algorithms/NAME.json, the package of its rl.algorithm (group
bellwether.algorithms) and the files that its section rl names. Those of other domains are removed. `dvc repro` always runs it
(data/packages/dvc.yaml); the stages that use such code and files depend on the two, so they run again only if these change. It
imports none of the packages.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from stages.runtime.command import command
from stages.runtime.files import atomic_text
from stages.runtime.lineage import dvc_hash
from stages.runtime.unlisted_domains import keep_only
from stages.runtime.validation import watched

FOLDER = Path("data/packages")
GROUPS = {"environments": "bellwether.domains", "algorithms": "bellwether.algorithms"}
"""Folder below FOLDER -> group of entry points."""
OWN = "bellwether"
METHODS = Path(__file__).parents[1] / "algorithms" / "methods"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def canonical(name: str) -> str:
    """A distribution's normalised name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def providers(group: str, name: str) -> list[Distribution]:
    """The installed distributions with the entry point `name`, sorted by name."""
    found = {canonical(point.dist.name): point.dist for point in entry_points(group=group, name=name) if point.dist is not None}
    return [found[key] for key in sorted(found)]


def _direct_url(dist: Distribution) -> dict[str, Any] | None:
    """Where the distribution was installed from (direct_url.json); None for an index."""
    text = dist.read_text("direct_url.json")
    return json.loads(text) if text else None


def _modules(dist: Distribution) -> set[str]:
    """Modules of the distribution's entry points and top_level.txt."""
    points = {point.module for point in dist.entry_points if point.group in GROUPS.values()}
    return points | set((dist.read_text("top_level.txt") or "").split())


def _sources(module: str) -> Iterator[tuple[str, Path]]:
    """(name, path) of the outermost regular package around `module`, or of the module."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        spec = find_spec(name)  # imports nothing: its parents are namespace packages
        if spec is not None and spec.origin is not None:
            folders = spec.submodule_search_locations
            yield from ((name, Path(place)) for place in folders or [spec.origin])
            return
        if spec is None:
            return


def described(dist: Distribution) -> dict[str, Any]:
    """The distribution's name and version, with hashes of its code if installed from a folder, or its commit or archive."""
    found: dict[str, Any] = {"package": canonical(dist.name), "version": dist.version}
    direct = _direct_url(dist)
    if direct is None and dist.files is not None:
        return found
    if direct is not None and "dir_info" not in direct:
        return {**found, **{kind: direct[kind] for kind in ("archive_info", "vcs_info") if kind in direct}}
    places = sorted({place for module in _modules(dist) for place in _sources(module)})
    return {**found, "files": [[name, dvc_hash(place)] for name, place in places if place.exists()]}


def with_local_requirements(dists: list[Distribution]) -> list[Distribution]:
    """These, and their direct and indirect requirements that were installed from a folder, except this repository's package."""
    found: dict[str, Distribution] = {}
    waiting = list(dists)
    while waiting:
        dist = waiting.pop()
        key = canonical(dist.name)
        if key in found or key == OWN:
            continue
        found[key] = dist
        for text in dist.requires or ():
            match = _NAME.match(text)
            try:
                required = distribution(match[0]) if match else None
            except PackageNotFoundError:
                continue
            if required is not None and "dir_info" in (_direct_url(required) or {}):
                waiting.append(required)
    return [found[key] for key in sorted(found)]


def names(values: Mapping[str, Any], domain: str) -> dict[str, str | None]:
    """Folder -> the domain's environment or algorithm in params.yaml; None for an algorithm of this repository."""
    own = (values.get("per_domain") or {}).get(domain) or {}
    method = {**(values.get("rl") or {}), **(own.get("rl") or {})}.get("algorithm")
    shipped = method is None or (METHODS / f"{method}.py").exists()
    return {"environments": domain, "algorithms": None if shipped else str(method)}


def _texts(settings: Any) -> Iterator[str]:
    """All texts in settings, at any depth; not keys."""
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, (Mapping, list)):
        for held in settings.values() if isinstance(settings, Mapping) else settings:
            yield from _texts(held)


def named_files(values: Mapping[str, Any], domain: str) -> dict[str, list[dict[str, str]]]:
    """Folder -> the files and folders below data/raw that the domain's environment or section rl names in params.yaml, with their
    hashes, sorted. Those that do not exist are left out: the stage that reads them says so."""
    own = (values.get("per_domain") or {}).get(domain) or {}
    sections = {"environments": [own.get("environment")], "algorithms": [values.get("rl"), own.get("rl")]}
    found: dict[str, list[dict[str, str]]] = {}
    for folder, settings in sections.items():
        places = sorted({name for name in _texts(settings) if watched(name) and Path(name).exists()})
        found[folder] = [{"file": name, "md5": dvc_hash(Path(name))} for name in places]
    return found


def write_if_changed(path: Path, text: str) -> None:
    """Leave a file with the same text alone, so that DVC does not hash it again."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    atomic_text(path, text)


def record(values: Mapping[str, Any], domain: str) -> None:
    """Write the domain's two files. Where its package is not installed, what is there stays."""
    files = named_files(values, domain)
    for folder, name in names(values, domain).items():
        path = FOLDER / folder / f"{domain}.json"
        found = [] if name is None else providers(GROUPS[folder], name)
        if name is not None and not found:
            known = f"keeping {path}" if path.exists() else "its code is not tracked"
            print(f"packages: no installed package provides {name} ({GROUPS[folder]}); {known}", file=sys.stderr)
            if path.exists():
                continue
        records = [*(described(dist) for dist in with_local_requirements(found)), *files[folder]]
        write_if_changed(path, json.dumps(records, indent=1, sort_keys=True) + "\n")


@command
def main() -> int:
    argparse.ArgumentParser(prog="python -m stages.runtime.packages", description=(__doc__ or "").strip()).parse_args()
    values = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    listed = [*values["domains"], *((values.get("evaluate") or {}).get("transfer") or [])]
    keep_only(Path(), listed, [str(FOLDER / folder) for folder in GROUPS])
    for domain in sorted(set(listed)):
        record(values, domain)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
