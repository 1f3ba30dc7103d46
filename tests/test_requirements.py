"""The versions in requirements.lock."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


def test_locked_versions_run_on_the_oldest_python_that_we_support() -> None:
    """Contract: `make lifecycle` installs on any Python that README promises. The lock is made on a newer one, for which pip may
    choose packages that need it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = re.fullmatch(r">=(3\.\d+)", project["requires-python"])
    assert oldest is not None
    names = [line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()]
    checked, refused = 0, []
    for name in names:
        try:
            found = metadata(name)
        except PackageNotFoundError:  # of an extra
            continue
        checked += 1
        if not SpecifierSet(found.get("Requires-Python") or "").contains(f"{oldest[1]}.0"):
            refused.append(f"{name} {found['Version']}: {found['Requires-Python']}")
    assert checked > 100
    assert refused == []
