"""What packages outside this repository a domain's stages run: names and hashes, for DVC to see them change.

`python -m stages.runtime.packages --domain NAME` writes data/packages/environments/NAME.json, the package that brings the domain
(entry points of the group bellwether.domains), and data/packages/algorithms/NAME.json, the one that brings its rl.algorithm
(group bellwether.algorithms). `dvc repro` starts it each time (data/packages/dvc.yaml); the stages that run such code depend on
the files, and so run again if, and only if, these change. Imports none of the packages.
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

FOLDER = Path("data/packages")
GROUPS = {"environments": "bellwether.domains", "algorithms": "bellwether.algorithms"}
"""Folder below FOLDER -> group of entry points."""
OWN = "bellwether"
METHODS = Path(__file__).parent / "algorithms" / "methods"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def providers(group: str, name: str) -> list[Distribution]:
    """The installed distributions that bring `name`, in the order of their names."""
    found = {canonical(point.dist.name): point.dist for point in entry_points(group=group, name=name) if point.dist is not None}
    return [found[key] for key in sorted(found)]


def _direct_url(dist: Distribution) -> dict[str, Any] | None:
    """Where pip and its like had the distribution from, None if that was an index (direct_url.json)."""
    text = dist.read_text("direct_url.json")
    return json.loads(text) if text else None


def _modules(dist: Distribution) -> set[str]:
    """Modules that the distribution's entry points name, and those that its metadata list."""
    points = {point.module for point in dist.entry_points if point.group in GROUPS.values()}
    return points | set((dist.read_text("top_level.txt") or "").split())


def _sources(module: str) -> Iterator[tuple[str, Path]]:
    """Name and place of the outermost package around `module` that has a file or folder to itself."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        spec = find_spec(name)  # runs nothing: what lies around is a namespace
        if spec is not None and spec.origin is not None:
            folders = spec.submodule_search_locations
            yield from ((name, Path(place)) for place in folders or [spec.origin])
            return
        if spec is None:
            return


def described(dist: Distribution) -> dict[str, Any]:
    """The distribution's name and version; beside them hashes of its code where that is a folder of this machine, and the commit
    or archive where it came from one."""
    told: dict[str, Any] = {"package": canonical(dist.name), "version": dist.version}
    direct = _direct_url(dist)
    if direct is None and dist.files is not None:
        return told
    if direct is not None and "dir_info" not in direct:
        return {**told, **{kind: direct[kind] for kind in ("archive_info", "vcs_info") if kind in direct}}
    places = sorted({place for module in _modules(dist) for place in _sources(module)})
    return {**told, "files": [[name, dvc_hash(place)] for name, place in places if place.exists()]}


def with_local_requirements(dists: list[Distribution]) -> list[Distribution]:
    """These, and what they require, directly or not, that was installed from a folder; this repository's own package aside."""
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
    """Folder -> what the parsed params.yaml names of it for a domain; an algorithm of this repository is None."""
    own = (values.get("per_domain") or {}).get(domain) or {}
    method = {**(values.get("rl") or {}), **(own.get("rl") or {})}.get("algorithm")
    shipped = method is None or (METHODS / f"{method}.py").exists()
    return {"environments": domain, "algorithms": None if shipped else str(method)}


def write_if_changed(path: Path, text: str) -> None:
    """A file that says the same keeps its time, so that DVC does not read it again."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    atomic_text(path, text)


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.runtime.packages", description=(__doc__ or "").strip())
    parser.add_argument("--domain", required=True, help="one of `domains` in params.yaml")
    domain = parser.parse_args().domain
    values = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    for folder, name in names(values, domain).items():
        path = FOLDER / folder / f"{domain}.json"
        found = [] if name is None else providers(GROUPS[folder], name)
        if name is not None and not found:
            known = "what is known of its package stays" if path.exists() else "nothing is known of its package"
            print(f"packages: no installed package brings {name} ({GROUPS[folder]}); {known}", file=sys.stderr)
            if path.exists():
                continue
        told = [described(dist) for dist in with_local_requirements(found)]
        write_if_changed(path, json.dumps(told, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
