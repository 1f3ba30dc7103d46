"""Reads the repository's own YAML files, such as dvc.yaml, quickly. Files that people edit are read by
stages/runtime/validation.py, which points at mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, ten times as fast, where PyYAML was built with it."""


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises yaml.YAMLError, FileNotFoundError."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)
