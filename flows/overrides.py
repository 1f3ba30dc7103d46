"""What an experiment needs of the checkout and of its changes of params.yaml, checked before it is run.

DVC runs an experiment on a copy of what git knows, and changes only keys that params.yaml has; what is wrong with either shows
when the run has begun, in DVC's words.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flows.pipeline import BAD_PARAMETERS, StageFailedError, read_params, sources


def check_files(root: Path) -> None:
    """Raise StageFailedError for files that the pipeline depends on and git does not know: they would be missing in the copy."""
    command = ["git", "ls-files", "--others", "--exclude-standard", "--", *sources(root)]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if listed.returncode:
        raise StageFailedError(f"git ls-files failed in {root}: {listed.stderr.strip()}", BAD_PARAMETERS)
    unknown = listed.stdout.splitlines()
    if unknown:
        raise StageFailedError(
            f"git does not know {', '.join(unknown)}, so the copy of the checkout that an experiment runs on would lack "
            f"{'it' if len(unknown) == 1 else 'them'}: git add {' '.join(unknown)}, and commit, or name what is not needed in "
            ".gitignore",
            BAD_PARAMETERS,
        )


def _missing(values: Any, key: str) -> str | None:
    """Why params.yaml has no key `key` ("rl.algoritm"), None if it has it."""
    passed: list[str] = []
    for part in key.split("."):
        if not isinstance(values, dict):
            return f"'{'.'.join(passed)}' has no keys below it"
        if part not in values:
            near = difflib.get_close_matches(part, [str(name) for name in values], n=1)
            place = f"'{'.'.join(passed)}'" if passed else "params.yaml"
            advice = f"Did you mean '{near[0]}'?" if near else f"{place} has {', '.join(map(str, values)) or 'no keys'}"
            return f"unknown key '{key}'. {advice}"
        passed.append(part)
        values = values[part]
    return None


def check_overrides(root: Path, overrides: Sequence[str]) -> None:
    """Raise StageFailedError where params.yaml with `overrides` ("rl.algorithm=rloo") has an unknown key or is not valid."""
    from dvc.exceptions import DvcException
    from dvc.utils.hydra import apply_overrides

    values = read_params(root)
    for override in overrides:
        missing = _missing(values, override.partition("=")[0])
        if missing:
            raise StageFailedError(missing, BAD_PARAMETERS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.yaml"
        path.write_bytes((root / "params.yaml").read_bytes())
        for override in overrides:
            try:
                apply_overrides(path, [override])
            except DvcException as error:
                raise StageFailedError(f"{override}: {error.__cause__ or error}", BAD_PARAMETERS) from error
        _check(root, path.read_bytes())


@cache
def _check(root: Path, content: bytes) -> None:
    """Have the checkout's own code check `content` as params.yaml. Raises StageFailedError with what it says."""
    if not (root / "stages" / "params.py").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.yaml"
        path.write_bytes(content)
        command = [sys.executable, "-m", "stages.params", "--file", str(path)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise StageFailedError(done.stderr.strip(), BAD_PARAMETERS)
