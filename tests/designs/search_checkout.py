"""Settings of a small design search, and their files in a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from stages.designs.settings import SETTINGS

VALUES: dict[str, Any] = {
    "domains": ["search"],
    "resources": {"threads": 1, "workers": 1, "slots": 8},
    "evaluate": {"attempts": 1, "resamples": 100},
    "design": {
        **{"budget": 7, "tasks": 6, "attempts": 2, "labels": {"balanced": 2}, "confirm": {"designs": 2, "tasks": 3}},
        "space": {
            **{"model": ["sft"], "choose": ["none", "vote"], "think": ["none"], "window": [1, None], "recall": ["none", "task"]},
            **{"draws": [3], "temperature": [0.0, 0.5], "top_p": [0.95]},
        },
    },
    "per_domain": {"search": {}},
}


def of_params(values: dict[str, Any]) -> dict[str, Any]:
    """`values` without the search's own settings: what params.yaml holds."""
    return {name: value for name, value in values.items() if name != "design"}


def write_files(root: Path, values: dict[str, Any]) -> None:
    (root / "params.yaml").write_text(yaml.safe_dump(of_params(values)))
    (root / SETTINGS).parent.mkdir(parents=True, exist_ok=True)
    (root / SETTINGS).write_text(yaml.safe_dump(values["design"]))
