"""Commands of git."""

from __future__ import annotations

import subprocess
from pathlib import Path


class GitError(RuntimeError):
    """A git command failed; the message quotes what git wrote."""


def git(root: Path, *arguments: str, timeout: float | None = None) -> str:
    """Output of a git command in `root`. Raises GitError, also without git and after `timeout` seconds."""
    command = f"git {' '.join(arguments)} failed in {root}"
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"{command}: {error}") from error
    if done.returncode:
        raise GitError(f"{command}: {done.stderr.strip()}")
    return done.stdout
