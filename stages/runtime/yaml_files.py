"""Reads YAML files such as dvc.yaml and the board's experiments quickly. stages/runtime/validation.py reads params.yaml, and
refuses what YAML would let pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, ten times as fast, where PyYAML was built with it."""


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises yaml.YAMLError, FileNotFoundError."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)


def value_at(values: Any, key: str, absent: Any = None) -> Any:
    """The value at a dotted key such as rl.seed, or `absent`."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return absent
        values = values[part]
    return values
