"""Search tasks that the curate stage makes, with files of other people's conversations among its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from stages import curate
from stages.exchange.records import write_records
from stages.params import parse_params
from stages.records.episode import IMPORTED, Episode, read_episodes
from stages.runtime.stage import StageContext

PARAMS: dict[str, Any] = {
    "domains": ["search"],
    "curate": {"train": 6, "valid": 2, "test": 4},
    "resources": {"workers": 1, "threads": 1},
    "per_domain": {"search": {}},
}


class NullTracker:
    def __getattr__(self, name: str) -> Any:
        return lambda *values, **settings: None


def curated(root: Path, lines: Sequence[str], imports: Sequence[str] = (), **changes: Any) -> Path:
    """The curate stage in `root`; its folder."""
    (root / "data/raw").mkdir(parents=True, exist_ok=True)
    (root / "data/raw/search.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    values = {**PARAMS, **changes, "curate": {**PARAMS["curate"], **changes.get("curate", {}), "imports": list(imports)}}
    (root / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    curate.run(StageContext("curate", "search", parse_params(values), root, NullTracker()))  # type: ignore[arg-type]
    return root / "data/curated/search"


def imported(root: Path, lines: Sequence[str], rows: Sequence[dict[str, Any]], kind: str = "jsonl", **changes: Any) -> Path:
    file = f"data/raw/teacher.{kind}"
    write_records(root / file, rows)
    return curated(root, lines, [file], **changes)


def imported_episodes(folder: Path) -> list[Episode]:
    return [episode for episode in read_episodes(folder / "demonstrations.parquet") if episode.policy_hash == IMPORTED]
