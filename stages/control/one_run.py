"""The command line of a program of lane control: settings from a file, figures to a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from stages.records.episode import write_json
from stages.runtime.parent import die_with_parent
from stages.runtime.validation import ParamsError, Section, explain

S = TypeVar("S", bound=Section)


def one_run(
    prefix: str,
    doc: str | None,
    section: type[S],
    run: Callable[[S], Mapping[str, float]],
    use_threads: Callable[[int], None] | None = None,
) -> int:
    """Do one run with the settings of `--settings` and write its figures, each named `<prefix>.<figure>`, to `--result`.
    use_threads: what takes `--threads`.
    Returns the exit code, 2 for settings that are refused."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--settings", type=Path, required=True, help=f"YAML: {section.__name__}")
    parser.add_argument("--result", type=Path, required=True, help="JSON with the figures")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    die_with_parent()
    if use_threads is not None:
        use_threads(options.threads)
    try:
        settings = section.model_validate(yaml.safe_load(options.settings.read_text(encoding="utf-8")) or {})
        found = {f"{prefix}.{name}": value for name, value in run(settings).items()}
    except (OSError, yaml.YAMLError, ParamsError, ValidationError) as error:
        reason = explain(error, section, str(options.settings)) if isinstance(error, ValidationError) else error
        print(f"{prefix}: {reason}", file=sys.stderr)
        return 2
    write_json(options.result, {**found, "environment_steps": 0})
    return 0
