"""Writes an overlay, such as a profile, into params.yaml and keeps its comments."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_file
from stages.runtime.validation import ParamsError, parse_yaml


def overlaid(path: Path, overlay: Path) -> str:
    """The text of `path` with the values of `overlay` in it, comments kept. Raises ParamsError for a file that can't be read."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    yaml_io = YAML()
    # Nothing but what was overlaid is to look different afterwards.
    yaml_io.width, yaml_io.preserve_quotes = 4096, True
    yaml_io.representer.add_representer(type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null"))

    def write_over(target: Any, values: Any) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                write_over(target[key], value)
            else:
                target[key] = value

    try:
        for file in (path, overlay):
            parse_yaml(file.read_bytes(), file, may_be_empty=file == overlay)
        values = yaml_io.load(path.read_bytes())
        write_over(values, yaml_io.load(overlay.read_bytes()) or {})
    except OSError as error:
        raise ParamsError(f"{error.filename} can't be read: {error.strerror}") from error
    except YAMLError as error:
        raise ParamsError(f"{overlay} can't be written into {path}: {error}") from error
    text = io.StringIO()
    yaml_io.dump(values, text)
    return text.getvalue()


def write_params(path: Path, text: str) -> None:
    """Replace params.yaml by `text`, all of it or nothing. A link stays a link, and the file's permissions stay as they are."""
    target = path.resolve()
    with atomic_file(target) as partial:
        partial.write_text(text, encoding="utf-8")
        shutil.copymode(target, partial)


def apply_overlay(path: Path, overlay: Path) -> None:
    """Write the values of `overlay` into params.yaml, keeping its comments. Raises ParamsError; checks no values."""
    write_params(path, overlaid(path, overlay))
