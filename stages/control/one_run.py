"""The command line of a program of lane control: settings from a file, figures to a file. What its commands refuse, and how."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from stages.records.episode import write_json
from stages.runtime.parent import die_with_parent
from stages.runtime.stage import BAD_PARAMETERS, FAILED
from stages.runtime.validation import ParamsError, Section, explain, parse_yaml

S = TypeVar("S", bound=Section)
REFUSED: tuple[type[Exception], ...] = (ParamsError, ModuleNotFoundError)
"""Errors whose message says all: what is wrong, where, and what to do. A package that is missing is one."""


def exit_code(prefix: str, work: Callable[[], None], refused: tuple[type[Exception], ...] = REFUSED) -> int:
    """Do `work`; 0, or after a message in place of a traceback BAD_PARAMETERS for what is `refused`, and FAILED where the system
    failed."""
    try:
        work()
    except refused as error:
        print(f"{prefix}: {error}", file=sys.stderr)
        return BAD_PARAMETERS
    except OSError as error:
        print(f"{prefix}: {error}", file=sys.stderr)
        return FAILED
    return 0


def one_run(
    prefix: str,
    doc: str | None,
    section: type[S],
    run: Callable[[S], Mapping[str, float]],
    use_threads: Callable[[int], None] | None = None,
) -> int:
    """Do one run with the settings of `--settings` and write its figures, each named `<prefix>.<figure>`, to `--result`.
    use_threads: what takes `--threads`. The exit code: see `exit_code`."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--settings", type=Path, required=True, help=f"YAML: {section.__name__}")
    parser.add_argument("--result", type=Path, required=True, help="JSON with the figures")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    die_with_parent()
    if use_threads is not None:
        use_threads(options.threads)

    def work() -> None:
        try:
            settings = section.model_validate(_values(options.settings))
            found = {f"{prefix}.{name}": value for name, value in run(settings).items()}
        except ValidationError as error:
            raise ParamsError(explain(error, section, str(options.settings))) from error
        if wrong := [f"{name} is {value}" for name, value in found.items() if not math.isfinite(value)]:
            raise ParamsError(
                f"{options.settings}: {', '.join(wrong)}, as numbers left the range of floating point; lower learning rates, or "
                f"bring rewards, weights and noise nearer to 1"
            )
        write_json(options.result, {**found, "environment_steps": 0})

    return exit_code(prefix, work)


def _values(path: Path) -> Any:
    """What a YAML file holds. Raises ParamsError if it can't be read."""
    try:
        return parse_yaml(path.read_bytes(), path, may_be_empty=True)
    except OSError as error:
        raise ParamsError(f"--settings {path}: {error}") from error
