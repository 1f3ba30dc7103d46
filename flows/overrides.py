"""Checks of an experiment before it runs: the checkout's files, and its overrides of params.yaml.

Overrides are written `key=value` or `++key=value`; both set keys that params.yaml does not list.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flows.pipeline import read_params, sources
from flows.process import BAD_PARAMETERS, StageFailedError
from stages.runtime.git import GitError, git

OVERRIDE = r"^(\+\+)?[\w.]+=.+$"
FORCE = "++"
"""In front of a key, it has DVC set the key whether params.yaml lists it or not."""


def normalised(override: str) -> str:
    """`key=value`, without FORCE."""
    return override.removeprefix(FORCE)


def check_files(root: Path) -> None:
    """Raise StageFailedError for untracked files that the pipeline depends on: DVC's copy of the checkout would lack them."""
    try:
        unknown = git(root, "ls-files", "--others", "--exclude-standard", "--", *sources(root)).splitlines()
    except GitError as error:
        raise StageFailedError(str(error), BAD_PARAMETERS) from error
    if unknown:
        raise StageFailedError(
            f"experiments run on a copy of what git tracks, and {', '.join(unknown)} "
            f"{'is' if len(unknown) == 1 else 'are'} untracked: git add {' '.join(unknown)}, and commit, or list in .gitignore "
            "what is not needed",
            BAD_PARAMETERS,
        )


def check_overrides(root: Path, overrides: Sequence[str]) -> None:
    """Raise StageFailedError where params.yaml with `overrides` ("rl.algorithm=rloo") has an unknown key or is not valid."""
    from dvc.exceptions import DvcException
    from dvc.utils.hydra import apply_overrides

    read_params(root)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.yaml"
        path.write_bytes((root / "params.yaml").read_bytes())
        for override in overrides:
            try:
                apply_overrides(path, [FORCE + normalised(override)])
            except DvcException as error:
                raise StageFailedError(f"{override}: {error.__cause__ or error}", BAD_PARAMETERS) from error
        _check(root, path.read_bytes())


@cache
def _check(root: Path, content: bytes) -> None:
    """Have the checkout's own code check `content` as params.yaml. Raises StageFailedError with its message."""
    if not (root / "stages" / "params.py").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.yaml"
        path.write_bytes(content)
        command = [sys.executable, "-m", "stages.params", "--file", str(path)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise StageFailedError(done.stderr.strip(), BAD_PARAMETERS)
