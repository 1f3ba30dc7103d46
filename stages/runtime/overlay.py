"""Edits of params.yaml that keep its comments: overlays, such as profiles, and migrations of older files."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_file, atomic_text
from stages.runtime.listed_keys import listed_keys
from stages.runtime.validation import MOVED, RENAMED, ParamsError, parse_yaml


def _round_trip() -> Any:
    """A YAML reader and writer that preserves comments and the formatting of unchanged lines."""
    from ruamel.yaml import YAML

    found = YAML()
    found.width, found.preserve_quotes = 4096, True
    found.representer.add_representer(type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null"))
    return found


def _dumped(round_trip: Any, values: Any) -> str:
    text = io.StringIO()
    round_trip.dump(values, text)
    return text.getvalue()


def overlaid(path: Path, overlay: Path) -> str:
    """The text of `path` updated with `overlay`, comments preserved. Raises ParamsError for an unreadable file."""
    from ruamel.yaml.error import YAMLError

    def write_over(target: Any, values: Any) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                write_over(target[key], value)
            elif key in target or not target or target.fa.flow_style():
                target[key] = value
            else:  # before the last key, whose comment has the blank line that ends the section
                target.insert(len(target) - 1, key, value)

    round_trip = _round_trip()
    try:
        for file in (path, overlay):
            parse_yaml(file.read_bytes(), file, may_be_empty=file == overlay)
        values = round_trip.load(path.read_bytes())
        write_over(values, round_trip.load(overlay.read_bytes()) or {})
        return _dumped(round_trip, values)
    except RecursionError as error:
        raise ParamsError(f"{overlay} can't be applied to {path}: values are nested too deeply") from error
    except OSError as error:
        raise ParamsError(f"{error.filename} can't be read: {error.strerror}") from error
    except YAMLError as error:
        raise ParamsError(f"{overlay} can't be applied to {path}: {error}") from error


SCHEMA = "# yaml-language-server: $schema=params.schema.json\n"
"""First line of params.yaml, by which editors find the schema."""


@dataclass
class Migration:
    """A params.yaml in the current format. `changes`: one line per change; `moved`: file -> text of sections that are now
    files."""

    text: str
    changes: list[str] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)


def migrated(path: Path, defaults: Mapping[str, Any], listed: Container[str]) -> Migration:
    """`path` with keys renamed (RENAMED) and sections moved (MOVED); if anything changed, also without nulls and nested keys that
    equal `defaults` and are not `listed` in dvc.yaml. Raises ParamsError for an unreadable file."""
    parse_yaml(path.read_bytes(), path)
    round_trip = _round_trip()
    values, made = round_trip.load(path.read_bytes()), Migration("")

    def rename(sections: Any, place: str) -> None:
        for former, new in RENAMED.items():
            (section, name), now = former.split("."), new.rpartition(".")[2]
            if name in (sections.get(section) or {}):
                inner = sections[section]
                inner.insert(list(inner).index(name), now, inner[name])
                if name in inner.ca.items:
                    inner.ca.items[now] = inner.ca.items.pop(name)
                del inner[name]
                made.changes.append(f"renamed {place}{former} to {place}{new}")

    def drop(section: Any, usual: Any, place: str) -> None:
        for key in [key for key in section if key in usual]:
            where, value = f"{place}{key}", section[key]
            nested = isinstance(value, dict) and isinstance(usual[key], dict)
            if nested:
                drop(value, usual[key], f"{where}.")
            if where in listed or (len(section) == 1 and place[:-1] in listed):
                continue  # ruamel misplaces the comment of a section without keys
            if nested and not value and usual[key]:
                del section[key]
            elif not nested and value == usual[key] and (where.count(".") > 1 or value is None):
                del section[key]
                made.changes.append(f"removed {where}: {'null' if value is None else value}, the default")

    rename(values, "")
    for domain, own in (values.get("per_domain") or {}).items():
        rename(own or {}, f"per_domain.{domain}.")
    for section in [name for name in MOVED if name in values]:
        made.moved[MOVED[section]] = _dumped(round_trip, values.pop(section))
        made.changes.append(f"moved section {section} to {MOVED[section]}")
    if made.changes:
        drop(values, {key: value for key, value in defaults.items() if key != "per_domain"}, "")
    text = _dumped(round_trip, values)
    made.text = text if text.startswith(SCHEMA) else SCHEMA + text
    return made


def write_params(path: Path, text: str) -> None:
    """Atomically replace params.yaml by `text`; a symbolic link and the file's permissions are preserved."""
    target = path.resolve()
    with atomic_file(target) as partial:
        partial.write_text(text, encoding="utf-8")
        shutil.copymode(target, partial)


def migrate(path: Path, defaults: Mapping[str, Any], pipeline: Path, check: Callable[[Mapping[str, Any], str], Any]) -> None:
    """Migrate a params.yaml of an earlier release (`migrated`) and print the changes. If `check` raises ParamsError for the
    result, the file is unchanged."""
    made = migrated(path, defaults, listed_keys(pipeline))
    check(parse_yaml(made.text.encode(), path), f"{path.name}, migrated")
    for name, text in made.moved.items():
        target = path.resolve().parent / name
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_text(target, text)
    if made.changes:
        write_params(path, made.text)
    print("\n".join(made.changes) or f"{path.name} is up to date")
