"""The `search` domain for benchmarks: training tasks built from data/raw, without curation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Options


@dataclass(frozen=True)
class SearchTasks:
    """`worlds`: folder read by the environments; `named`: name of the weights."""

    params: Any
    domain: Any
    tasks: list[Any]
    worlds: Path
    weights: Path
    named: str

    def make(self) -> Any:
        """A new environment."""
        return self.domain.make(self.worlds)


def weights(options: Options) -> tuple[Path, str]:
    """(folder, name) of the SFT policy if it exists, else of the base model."""
    name = "data/models/sft"
    if options.quick or not (options.root / name / "model.safetensors").exists():
        name = "data/base"
    return options.root / name, name


def search_tasks(options: Options, policy: tuple[Path, str]) -> SearchTasks:
    """Training tasks with the settings of params.yaml."""
    from stages.environments.registry import load_domain
    from stages.params import load_params

    params = load_params(options.root / "params.yaml")
    domain = load_domain("search", params.per_domain["search"].environment)
    with (options.root / "data" / "raw" / "search.jsonl").open(encoding="utf-8") as lines:
        records = [record for record in map(json.loads, lines) if record["split"] == "train"]
    folder = options.scratch / "data" / "curated" / "search"
    worlds = folder / "worlds"
    worlds.mkdir(parents=True, exist_ok=True)
    tasks = domain.build(records[: options.size(200, 24)], worlds, 1)
    return SearchTasks(params, domain, tasks, worlds, *policy)
