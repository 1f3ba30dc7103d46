"""The keys that dvc.yaml lists: DVC, which knows no defaults, needs each of them in params.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.runtime.validation import ParamsError
from stages.runtime.yaml_files import read_yaml, value_at

_NAMED = re.compile(r"\$\{([^}]+)\}")


def listed_keys(pipeline: Path) -> set[str]:
    """The keys of params.yaml in the stages' lists, `${item.domain}` standing for a domain."""
    stages = read_yaml(pipeline)["stages"].values()
    return {key for stage in stages for key in stage.get("params", ()) if isinstance(key, str)}


def _needed(pipeline: Path, defaults: Mapping[str, Any]) -> Iterator[str]:
    """The keys that DVC reads with the domains of `defaults`: each stage's own, and those that name its domains."""
    for stage in read_yaml(pipeline)["stages"].values():
        domains: list[str] = []
        for text in stage.get("matrix", {}).values():
            for named in _NAMED.findall(text):
                yield named
                domains += value_at(defaults, named)
        for key in stage.get("params", ()):
            if isinstance(key, str):
                yield from (key.replace("${item.domain}", domain) for domain in (domains if "${item" in key else [""]))


def check_listed(values: Mapping[str, Any], complete: Mapping[str, Any], path: Path) -> None:
    """Raise ParamsError if `values`, the content of the file `path`, lacks a key that the dvc.yaml beside it lists. `complete`:
    the values with all defaults."""
    pipeline = path.parent / "dvc.yaml"
    if not pipeline.exists():
        return
    problems = []
    for key in dict.fromkeys(_needed(pipeline, complete)):
        if value_at(values, key, ...) is not ...:
            continue
        section, _, name = key.rpartition(".")
        default = value_at(complete, key)
        shown = "{}" if isinstance(default, Mapping) else json.dumps(default)
        where = f"below {section}" if section else "at the top level"
        problems.append(
            f"{path.name}: add `{name}: {shown}`, its default, {where}: dvc.yaml lists {key}, and DVC knows no defaults"
        )
    if problems:
        raise ParamsError("\n".join(problems))
